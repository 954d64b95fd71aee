"""What a measurement reports: one row for each trainer, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tracefp4.evaluation.gap import Scored
from tracefp4.rl.metrics import k3
from tracefp4.rl.statistics import cluster_sums, ratio_bootstrap


@dataclass(slots=True)
class Row:
    """One trainer on one set of rollouts."""

    name: str
    plan: str | None
    decoder: str | None
    route_replay: bool
    k3: float
    k3_ci: tuple[float | None, float | None]
    mean_abs: float
    max: float
    min: float
    p999: float
    wrong_code_rate: float | None
    bytes_per_token: float | None
    scale_check_failures: float | None = None
    pulled_share: float | None = None
    """Share of the vectors of checked sites whose bits were pulled; their bytes are in ``bytes_per_token``."""
    code_steps: list[float] | None = None
    """Shares of codes that are 0, 1, 2, 3, 4 or more codebook entries from the rollout's."""
    bf16_layers: int = 0
    """First layers that rollout and trainer left in BF16."""


@dataclass(slots=True)
class Measurement:
    """Everything that one ``measure`` found."""

    model: str
    spec: str
    numerics: str
    device: str
    engine: str
    tokens: int
    prompts: int
    rows: list[Row] = field(default_factory=list)
    sites: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def gap_row(
    name: str,
    scored: Scored,
    prompts: Sequence[int],
    *,
    plan: str | None,
    decoder: str | None,
    replay: bool,
    size: float | None,
) -> Row:
    """Summarise deltas into a row; ``prompts`` gives the prompt number of each rollout.

    ``size`` is the bytes a token that the plan sends, without those that were pulled.
    """
    delta = scored.all
    clusters = np.repeat(np.asarray(prompts), [len(d) for d in scored.deltas])
    interval = ratio_bootstrap(*cluster_sums(k3(delta), clusters))
    totals = scored.observer.totals()
    return Row(
        name=name,
        plan=plan,
        decoder=decoder,
        route_replay=replay,
        k3=interval.estimate,
        k3_ci=(interval.low, interval.high),
        mean_abs=float(np.abs(delta).mean()),
        max=float(delta.max()),
        min=float(delta.min()),
        p999=float(np.quantile(np.abs(delta), 0.999)),
        wrong_code_rate=totals.get("wrong_code_rate"),
        bytes_per_token=None if size is None else size + scored.pulled_bytes_per_token,
        scale_check_failures=scored.scale_check_failures,
        pulled_share=None if scored.pulled is None else scored.pulled.share,
        code_steps=scored.observer.histogram() or None,
    )
