"""What a training step reports about the mismatch of its two sides.

For each response token, ``delta = log p_train - log p_rollout``: what the trainer thinks of a token minus what the
engine thought when it sampled it, both after temperature and before any truncation, both before the first update.
From it

    mismatch_kl/mean        mean of k3 = exp(delta) - 1 - delta, an unbiased and never negative estimate of
                            KL(rollout || train) when the tokens are samples of the rollout policy
    mismatch_kl/max         the largest k3 of a token
    logprob_diff/min, max   the most negative and the largest delta
    logprob_diff/mean_abs, p99, p999   mean and upper quantiles of abs(delta)
    mismatch_kl/from_<n>    mean k3 of the tokens of a position bucket, the n-th of their response and later ones

Deltas are collected flat, one float64 array a step, prompts and padding already removed. Nothing is clamped here: an
outlier is the finding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tracefp4.errors import TaskError

POSITION_EDGES = (0, 64, 256, 1024, 4096, 16384)
"""Lower edges of the position buckets, in response tokens: the mismatch grows with length."""


def token_deltas(train: Tensor, rollout: Tensor, places: Tensor) -> Tensor:
    """Deltas of the response tokens, row by row. Stays on the device.

    Args:
        train: ``(B, S)`` float32 log-probs of the trainer.
        rollout: ``(B, S)`` float32 log-probs of the engine.
        places: ``(T,)`` int64: where the response tokens stand among the ``B * S`` rows.

    Returns:
        ``(T,)`` float64, detached.
    """
    ours, theirs = (x.detach().flatten().index_select(0, places).double() for x in (train, rollout))
    return ours - theirs


def token_positions(response: Tensor, places: Tensor) -> Tensor:
    """Where in its response each token stands, counted from 0, in the order of :func:`token_deltas`.

    Args:
        response: ``(B, S)`` bool: the row's target is a response token.
        places: ``(T,)`` int64: where it is true.

    Returns:
        ``(T,)`` int64, on the device.
    """
    return (response.cumsum(1) - 1).flatten().index_select(0, places)


def k3(deltas: ArrayLike) -> NDArray[np.float64]:
    """``exp(delta) - 1 - delta`` for each token, float64, accurate for small deltas (``expm1``)."""
    delta = np.asarray(deltas, dtype=np.float64)
    return np.expm1(delta) - delta


def mismatch_metrics(deltas: ArrayLike, suffix: str = "", positions: ArrayLike | None = None) -> dict[str, float]:
    """The mismatch metrics of a step.

    Args:
        deltas: ``(T,)`` of all response tokens.
        suffix: appended to the group name, for example ``"_unguided"`` gives ``mismatch_kl_unguided/mean``.
        positions: ``(T,)`` of the same tokens in their responses; ``None`` leaves the mismatch by position out.

    Raises:
        TaskError: there are no response tokens.
    """
    delta = _tokens(deltas)
    divergence, size = k3(delta), np.abs(delta)
    p99, p999 = np.quantile(size, [0.99, 0.999])
    return {
        f"mismatch_kl{suffix}/mean": float(divergence.mean()),
        f"mismatch_kl{suffix}/max": float(divergence.max()),
        f"logprob_diff{suffix}/min": float(delta.min()),
        f"logprob_diff{suffix}/max": float(delta.max()),
        f"logprob_diff{suffix}/mean_abs": float(size.mean()),
        f"logprob_diff{suffix}/p99": float(p99),
        f"logprob_diff{suffix}/p999": float(p999),
        **({} if positions is None else _by_position(divergence, positions, suffix)),
    }


def _by_position(divergence: NDArray[np.float64], positions: ArrayLike, suffix: str) -> dict[str, float]:
    """Mean k3 of each bucket of :data:`POSITION_EDGES` that holds tokens."""
    bucket = np.searchsorted(np.asarray(POSITION_EDGES), np.asarray(positions).reshape(-1), side="right") - 1
    found = {POSITION_EDGES[i]: float(divergence[bucket == i].mean()) for i in np.unique(bucket)}
    return {f"mismatch_kl{suffix}/from_{edge}": mean for edge, mean in found.items()}


def _tokens(deltas: ArrayLike) -> NDArray[np.float64]:
    delta = np.asarray(deltas, dtype=np.float64).reshape(-1)
    if delta.size == 0:
        raise TaskError("there are no response tokens to measure a mismatch on")
    return delta
