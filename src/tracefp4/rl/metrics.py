"""What a training step reports about the mismatch of its two sides.

For each response token, ``delta = log p_train - log p_rollout``: what the trainer thinks of a token minus what the
engine thought when it sampled it, both after temperature and before any truncation, both before the first update.
From it

    mismatch_kl/mean        mean of k3 = exp(delta) - 1 - delta, an unbiased and never negative estimate of
                            KL(rollout || train) when the tokens are samples of the rollout policy
    mismatch_kl/max         the largest k3 of a token
    logprob_diff/min, max   the most negative and the largest delta
    logprob_diff/mean_abs, p99, p999   mean and upper quantiles of abs(delta)

Deltas are collected flat, one float64 array a step, prompts and padding already removed. Nothing is clamped here: an
outlier is the finding.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def k3(deltas: ArrayLike) -> NDArray[np.float64]:
    """``exp(delta) - 1 - delta`` for each token, float64, accurate for small deltas (``expm1``)."""
    delta = np.asarray(deltas, dtype=np.float64)
    return np.expm1(delta) - delta


def mismatch_metrics(deltas: ArrayLike, suffix: str = "") -> dict[str, float]:
    """The mismatch metrics of a step.

    Args:
        deltas: ``(T,)`` of all response tokens.
        suffix: appended to the group name, for example ``"_unguided"`` gives ``mismatch_kl_unguided/mean``.

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
    }


def mismatch_details(deltas: ArrayLike) -> dict[str, float]:
    """Further figures that other trainers report, for comparison with their logs.

    ``k1`` is ``mean(-delta)``; ``prob_error`` is ``mean(exp(abs(delta)))`` (NeMo-RL's ``token_mult_prob_error``, which
    alarms above 1.05); ``beyond_2x`` is the share of tokens whose probabilities differ by more than a factor of 2;
    ``ess`` is the effective sample size of the importance weights as a share of the tokens.
    """
    delta = _tokens(deltas)
    weight = np.exp(delta - delta.max())  # A common factor cancels in the ratio below, and nothing can overflow.
    with np.errstate(over="ignore"):  # Probabilities 300 orders of magnitude apart: infinity is the right answer.
        prob_error = float(np.exp(np.abs(delta)).mean())
    return {
        "mismatch/k1": float(-delta.mean()),
        "mismatch/prob_error": prob_error,
        "mismatch/beyond_2x": float((np.abs(delta) > np.log(2.0)).mean()),
        "mismatch/ess": float(weight.sum() ** 2 / (np.square(weight).sum() * weight.size)),
    }


def mismatch_by_position(
    deltas: Sequence[ArrayLike], edges: Sequence[int] = POSITION_EDGES
) -> list[dict[str, float | int]]:
    """Mean k3 and mean abs delta by position in the response.

    Args:
        deltas: one ``(n_i,)`` array a response, in token order.
        edges: ascending lower edges of the buckets, the first one 0.

    Returns:
        One row a bucket that holds tokens: ``{"from": edge, "tokens": n, "k3": mean, "mean_abs": mean}``.
    """
    arrays = [np.asarray(d, dtype=np.float64).reshape(-1) for d in deltas]
    delta = _tokens(np.concatenate(arrays) if arrays else np.empty(0))
    position = np.concatenate([np.arange(a.size) for a in arrays])
    bucket = np.searchsorted(np.asarray(edges), position, side="right") - 1
    rows: list[dict[str, float | int]] = []
    for index in np.unique(bucket):
        part = delta[bucket == index]
        mean_k3, mean_abs = float(k3(part).mean()), float(np.abs(part).mean())
        rows.append({"from": int(edges[index]), "tokens": int(part.size), "k3": mean_k3, "mean_abs": mean_abs})
    return rows


def _tokens(deltas: ArrayLike) -> NDArray[np.float64]:
    delta = np.asarray(deltas, dtype=np.float64).reshape(-1)
    if delta.size == 0:
        raise TaskError("there are no response tokens to measure a mismatch on")
    return delta
