"""tracefp4: reinforcement learning with FP4 rollouts and a trainer that rounds the way the rollout did.

Read the packages in this order, each builds on the ones before it:

``formats``     what an FP4 number is, and every choice in making one
``quantizers``  what chooses codes and scales: round to nearest, or guided by a rollout
``guidance``    what is kept of a rollout's quantization outcomes, and how it travels
``models``      the two seams of transformers models at which values are quantized
``rollout``     the engine that generates with FP4 experts and an FP4 KV cache
``training``    the forward pass that rounds as the rollout did
``methods``     one small file for each way to pair the two
``rl``          the reinforcement-learning loop around them
"""

__version__ = "0.1.0"
