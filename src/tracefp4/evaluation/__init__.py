"""Judging a policy, and the gap of its two execution paths.

``passk``    pass@k with a confidence interval
``gap``      log-probabilities of the same tokens on two paths
``measure``  the whole diagnosis of a model
"""
