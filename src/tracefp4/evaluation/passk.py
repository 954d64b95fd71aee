"""pass@k: the chance that at least one of ``k`` samples solves a problem, with an interval.

Drawing ``k`` samples once and looking is a noisy estimate. With ``n >= k`` samples of which ``c`` are right, the
unbiased estimate of a problem is ``1 - C(n - c, k) / C(n, k)``: the share of all subsets of size ``k`` that hold a
right one (Chen et al., arXiv 2107.03374, section 2.1). The figure of a benchmark is the mean over its problems.

The interval resamples *problems*: samples of one problem share its difficulty. With one sample a problem and ``k = 1``,
each problem is one independent trial, and Wilson's interval is used, which is sound near 0 % and 100 % as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracefp4.errors import TaskError
from tracefp4.rl.statistics import Interval, mean_bootstrap, wilson


@dataclass(frozen=True, slots=True)
class PassAtK:
    """pass@k of a task."""

    k: int
    estimate: float
    low: float | None
    high: float | None
    confidence: float
    problems: int
    samples: int
    """Samples a problem, or the least number of them if problems differ."""
    method: str
    """``wilson`` or ``bootstrap``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def pass_at_k(samples: ArrayLike, correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """Unbiased pass@k of each problem.

    Args:
        samples: ``(P,)`` integers ``n``, samples of each problem.
        correct: ``(P,)`` integers ``c``, right ones among them.
        k: at least 1 and at most the smallest ``n``.

    Returns:
        ``(P,)`` float64 in ``[0, 1]``.

    Raises:
        TaskError: ``k`` out of range, or counts that are impossible.
    """
    n, c = np.asarray(samples, dtype=np.int64).reshape(-1), np.asarray(correct, dtype=np.int64).reshape(-1)
    if n.size != c.size or n.size == 0 or (c < 0).any() or (c > n).any():
        raise TaskError(f"pass@{k}: need 0 <= correct <= samples for each of at least one problem")
    if not 1 <= k <= n.min():
        raise TaskError(f"pass@{k} needs at least {k} samples a problem, and {int(n.min())} were drawn")
    # C(n-c, k) / C(n, k) = prod over j of (n-c-j) / (n-j): no factorial, no overflow; a factor of 0 where n-c < k.
    j = np.arange(k)[:, None]
    return 1.0 - np.prod(np.maximum(n - c - j, 0) / (n - j), axis=0)


def evaluate_passk(
    outcomes: Sequence[Sequence[bool]],
    ks: Sequence[int] = (1,),
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[PassAtK]:
    """pass@k of a task for several ``k``.

    Args:
        outcomes: for each problem, whether each of its samples was right.
        ks: values of ``k``.
        confidence: of the intervals.
        resamples: bootstrap draws.
        seed: decides the draws.
    """
    n = np.array([len(row) for row in outcomes], dtype=np.int64)
    c = np.array([sum(bool(x) for x in row) for row in outcomes], dtype=np.int64)
    results = []
    for k in ks:
        scores = pass_at_k(n, c, k)
        interval: Interval
        if k == 1 and n.max() == 1:
            interval = wilson(int(c.sum()), int(n.size), confidence=confidence)
        else:
            interval = mean_bootstrap(scores, resamples=resamples, confidence=confidence, seed=seed)
        results.append(
            PassAtK(
                k=k,
                estimate=interval.estimate,
                low=interval.low,
                high=interval.high,
                confidence=confidence,
                problems=int(n.size),
                samples=int(n.min()),
                method=interval.method,
            )
        )
    return results
