"""The numbers of a run that a reader wants first, and what they say in sentences.

"First" and "last" are means over a tenth of the run (at least one step, at most ten), because a single step of sampled
rewards is noise. The mismatch is the mean over all steps. Coverage is the worst step, not the mean: one step without
guidance is what a reader must see.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefp4.report.figures import short
from tracefp4.report.panels import FLOOR_KEY, is_guided
from tracefp4.report.run_data import Run


@dataclass(frozen=True, slots=True)
class Headline:
    """Headline numbers; ``None`` where the run did not record one."""

    steps: int
    reward_first: float | None
    reward_last: float | None
    evaluations: tuple[tuple[str, str, str], ...]
    """Task, first and last pass@1 as text with interval."""
    mismatch: float | None
    unguided: float | None
    floor: float | None
    bytes_per_token: float | None
    bits_per_value: float | None
    saved: float | None
    coverage: float | None
    rollout_speed: float | None
    step_seconds: float | None


def headline(run: Run) -> Headline:
    """Compute the headline numbers of a run."""
    reward = run.series("reward/mean")
    window = max(1, min(10, len(reward.steps) // 10))
    floor = run.summary.get(FLOOR_KEY)
    coverage = run.series("guidance/coverage")
    parts = [run.series(f"time/{name}_s") for name in ("rollout", "reward", "train", "sync")]
    seconds = _mean(run, "time/step_s") or sum(part.mean() for part in parts if part)
    return Headline(
        steps=len({row["step"] for row in run.rows if "reward/mean" in row}),
        reward_first=reward.head(window) if reward else None,
        reward_last=reward.tail(window) if reward else None,
        evaluations=tuple(_evaluation(run, metric) for metric in run.evaluations() if run.series(metric)),
        mismatch=_mean(run, "mismatch_kl/mean"),
        unguided=_mean(run, "mismatch_kl_unguided/mean"),
        floor=float(floor) if isinstance(floor, int | float) else None,
        bytes_per_token=_mean(run, "guidance/bytes_per_token"),
        bits_per_value=_mean(run, "guidance/bits_per_value"),
        saved=_mean(run, "guidance/saved_share"),
        coverage=min(coverage.values) if coverage else None,
        rollout_speed=_mean(run, "throughput/rollout_tok_s"),
        step_seconds=seconds or None,
    )


def head_cards(run: Run, head: Headline) -> list[tuple[str, str, str]]:
    """Cards as (what, value, explanation), the result first."""
    cards: list[tuple[str, str, str]] = []
    if head.reward_first is not None and head.reward_last is not None:
        cards.append(
            ("Reward", f"{short(head.reward_first)} → {short(head.reward_last)}", "training, first to last steps")
        )
    for task, first, last in head.evaluations:
        cards.append((f"Held-out {task}", f"{first.split(' [')[0]} → {last.split(' [')[0]}", f"pass@1; last {last}"))
    if head.mismatch is not None:
        what = "Mismatch, guided" if is_guided(run) else "Train-rollout mismatch"
        cards.append((what, short(head.mismatch), "k3, nats a token, mean of all steps"))
    if head.unguided is not None:
        cards.append(("Mismatch, unguided", short(head.unguided), "same batches, guidance withheld"))
    if head.floor is not None:
        cards.append(("BF16 floor", short(head.floor), "mismatch of two BF16 paths"))
    if head.bytes_per_token is not None:
        bits = "" if head.bits_per_value is None else f"; {short(head.bits_per_value)} bits a value"
        cards.append(("Guidance size", data_size(head.bytes_per_token), f"a token{bits}"))
    if head.saved is not None:
        cards.append(("Never shipped", share(head.saved), "of the guidance bytes: samples that trained nothing"))
    if head.coverage is not None:
        cards.append(("Coverage", share(head.coverage), "of (token, site) pairs guided, worst step"))
    if head.rollout_speed is not None and head.step_seconds is not None:
        cards.append(("Rollout", f"{short(head.rollout_speed)} tok/s", f"{short(head.step_seconds)} s a step in all"))
    return cards


def verdict(run: Run, head: Headline) -> list[str]:
    """What the run showed, in at most three sentences."""
    said: list[str] = []
    if head.reward_first is not None and head.reward_last is not None:
        steps = "1 step" if head.steps == 1 else f"{head.steps} steps"
        text = f"Reward went from {short(head.reward_first)} to {short(head.reward_last)} in {steps}"
        for task, first, last in head.evaluations:
            text += f"; on held-out {task} items, pass@1 went from {first} to {last}"
        said.append(text + ".")
    if head.mismatch is not None:
        said.append(_mismatch_sentence(run, head))
    if head.bytes_per_token is not None and head.coverage is not None:
        size = data_size(head.bytes_per_token)
        saved = "" if head.saved is None else f"; {share(head.saved)} of its bytes never left the engine"
        said.append(f"Guidance took {size} a token and covered {share(head.coverage)} of the quantized values{saved}.")
    return said


def data_size(size: float) -> str:
    """Bytes as a person says them: ``640 B``, ``5.2 KiB``, ``1.3 MiB``."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def share(value: float) -> str:
    """A share that never rounds up to 100 %: ``100 %``, ``99.97 %``, ``> 99.99 %``."""
    if value == 1:
        return "100 %"
    return "> 99.99 %" if value > 0.9999 else f"{100 * value:.4g} %"


def _mismatch_sentence(run: Run, head: Headline) -> str:
    mismatch = head.mismatch or 0.0
    text = f"Trainer and rollout differ by {short(mismatch)} nats a token (k3)"
    without = "; without guidance the same batches differ by"
    if is_guided(run) and head.unguided is not None and mismatch > 0:
        ratio = head.unguided / mismatch
        relation = f"{short(ratio)} times as much" if ratio >= 1 else "which is less"
        text += f"{without} {short(head.unguided)}, {relation}"
    if head.floor is not None:
        relation = "below" if mismatch <= head.floor else "above"
        text += f"; this is {relation} the {short(head.floor)} by which two BF16 paths differ"
    return text + "."


def _evaluation(run: Run, metric: str) -> tuple[str, str, str]:
    series = run.series(metric)
    bounds = {step: (low, high) for step, low, high in run.intervals(metric)}
    texts = []
    for index in (0, -1):
        text = short(series.values[index])
        if series.steps[index] in bounds:
            low, high = bounds[series.steps[index]]
            text += f" [{short(low)}, {short(high)}]"
        texts.append(text)
    return metric.split("/")[1], texts[0], texts[1]


def _mean(run: Run, metric: str) -> float | None:
    series = run.series(metric)
    return series.mean() if series else None
