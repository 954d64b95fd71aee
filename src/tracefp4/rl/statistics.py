"""Confidence intervals for numbers measured on few prompts.

Tokens of one response are not independent, and neither are the samples of one prompt: five tokens of one response can
carry a third of a whole k3. An interval that treats tokens as independent draws is therefore far too narrow. Here the
*prompt* is the unit: :func:`ratio_bootstrap` draws prompts with replacement (the cluster bootstrap of Efron and
Tibshirani, *An Introduction to the Bootstrap*, 1993, chapter 8) and recomputes the figure as a ratio of sums, so that a
long response weighs as much as it does in the figure itself.

Everything is NumPy in float64, vectorised over resamples, and decided by a seed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracefp4.errors import TaskError

_CHUNK = 4_000_000
"""Counts held at once: resamples x clusters."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its confidence interval.

    ``low`` and ``high`` are ``None`` where no interval exists: a bootstrap over a single cluster knows nothing of the
    spread between clusters.
    """

    estimate: float
    low: float | None
    high: float | None
    confidence: float
    clusters: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def cluster_sums(values: ArrayLike, clusters: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and count of values by cluster.

    Args:
        values: ``(T,)`` numbers, one a token.
        clusters: ``(T,)`` integers, the prompt of each token; they need not be consecutive.

    Returns:
        ``(sums, counts)``, each ``(P,)`` float64 in ascending order of cluster number: what
        :func:`ratio_bootstrap` takes to put an interval around a mean over tokens.

    Raises:
        TaskError: the two arrays differ in length or are empty.
    """
    x, ids = np.asarray(values, dtype=np.float64).reshape(-1), np.asarray(clusters).reshape(-1)
    if x.size != ids.size or x.size == 0:
        raise TaskError(f"{x.size} values and {ids.size} cluster numbers: both must be given, one for one")
    _, index = np.unique(ids, return_inverse=True)
    return np.bincount(index, weights=x).astype(np.float64), np.bincount(index).astype(np.float64)


def ratio_bootstrap(
    numerators: ArrayLike, denominators: ArrayLike, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of ``sum(numerators) / sum(denominators)`` over clusters.

    Args:
        numerators: ``(P,)`` sums of the quantity by prompt (for a mean k3: the k3 of the prompt's tokens, added up).
        denominators: ``(P,)`` what they are counted by (tokens of the prompt); at least one positive, none negative.
        resamples: bootstrap draws.
        confidence: share of draws inside the interval.
        seed: decides the draws.

    Raises:
        TaskError: arrays of different length, no clusters, no positive denominator, or a setting out of range.
    """
    a, b = _pair(numerators, denominators)
    _check(resamples, confidence)
    estimate = float(a.sum() / b.sum())
    if a.size < 2:
        return Interval(estimate, None, None, confidence, a.size, "bootstrap")
    ratios = _resampled(a, b, resamples, np.random.default_rng(seed))
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high), confidence, a.size, "bootstrap")


def mean_bootstrap(values: ArrayLike, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Bootstrap interval of a mean over clusters, each with weight 1 (a score a problem, for example)."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    return ratio_bootstrap(x, np.ones_like(x), resamples=resamples, confidence=confidence, seed=seed)


def crossed_bootstrap(values: ArrayLike, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Bootstrap interval of the mean of a table of seeds by items; both are resampled (Owen, Ann. Appl. Stat. 1, 2007).

    For a difference of two arms give the table of differences, paired by seed and item: what a seed or an item does to
    both arms cancels. Items that are resampled alone would say how the trained policies differ on other problems, but
    not how another training run would have ended. With one seed there is no choice, and the interval is that of items
    (``method`` says which). With few seeds it is too narrow by about ``sqrt((S - 1) / S)``.

    Args:
        values: ``(S, I)``.
        resamples: bootstrap draws.
        confidence: share of draws inside the interval.
        seed: decides the draws.

    Raises:
        TaskError: an empty table, or a setting out of range.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise TaskError(f"expected a table of seeds by items, got shape {table.shape}")
    _check(resamples, confidence)
    seeds, items = table.shape
    method = "bootstrap over seeds and items" if seeds > 1 else "bootstrap over items"
    if items < 2:
        return Interval(float(table.mean()), None, None, confidence, items, method)
    rng = np.random.default_rng(seed)
    by_item = rng.multinomial(seeds, np.full(seeds, 1.0 / seeds), size=resamples) @ table / seeds
    drawn = rng.integers(items, size=(resamples, items), dtype=np.int32)
    means = np.take_along_axis(by_item, drawn, axis=1).mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(table.mean()), float(low), float(high), confidence, items, method)


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Interval of a success rate from independent trials (Wilson, JASA 22, 1927), sound near 0 and 1.

    Raises:
        TaskError: no trials, or more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise TaskError(f"{successes} successes of {trials} trials is not a rate")
    _check(1, confidence)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / trials
    shrink = 1 + z * z / trials
    middle = (p + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / shrink
    # At the ends the formula gives 0 and 1 exactly; rounding must not push them past.
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == trials else middle + half
    return Interval(p, low, high, confidence, trials, "wilson")


def _resampled(
    a: NDArray[np.float64], b: NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    # How often each cluster is drawn is multinomial; a draw without any denominator has no ratio and is drawn again.
    step = max(1, _CHUNK // a.size)
    share = np.full(a.size, 1.0 / a.size)
    ratios = np.empty(0)
    while ratios.size < resamples:
        counts = rng.multinomial(a.size, share, size=min(step, resamples - ratios.size)).astype(np.float64)
        below = counts @ b
        ratios = np.concatenate([ratios, (counts @ a)[below > 0] / below[below > 0]])
    return ratios


def _pair(numerators: ArrayLike, denominators: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a = np.asarray(numerators, dtype=np.float64).reshape(-1)
    b = np.asarray(denominators, dtype=np.float64).reshape(-1)
    if a.size != b.size or a.size == 0:
        raise TaskError(f"{a.size} numerators and {b.size} denominators: both must be given, one a cluster")
    if (b < 0).any() or b.sum() <= 0:
        raise TaskError("denominators of a ratio must be 0 or more, and one of them positive")
    return a, b


def _check(resamples: int, confidence: float) -> None:
    if resamples < 1:
        raise TaskError(f"{resamples} resamples are too few: at least 1")
    if not 0 < confidence < 1:
        raise TaskError(f"confidence {confidence} is not between 0 and 1 (usual: 0.95)")
