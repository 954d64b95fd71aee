"""The reinforcement-learning loop around the two execution paths.

``tasks``        prompts, and what a completion is worth
``prompts``      a task item becomes token ids
``grading``      answers of a model are judged in a process of their own
``advantages``   rewards become advantages
``losses``       advantages become a loss
``corrections``  weights against the mismatch that is left
``metrics``      what a step reports; ``statistics`` puts intervals around it
"""
