"""``trace``: rollout-guided quantization-aware training (TRACE).

As :mod:`~tracefp4.methods.qat`, and the rollout's outcomes decide the trainer's roundings: its block scales are taken,
and of the two FP4 neighbours of a value the one that the recorded bits name.
"""

from __future__ import annotations

from tracefp4.methods.base import Method


class Trace(Method):
    """FP4 rollout that records a plan's sites; trainer rounds as recorded and falls back to own scales elsewhere."""

    name = "trace"
    guided = True
