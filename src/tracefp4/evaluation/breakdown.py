"""Where the time of a rollout goes: the model, dequantizing the KV cache, recording guidance (figure 10 of the paper).

An engine on a GPU has no seam at which its parts could be clocked: attention widens FP4 codes in registers, kernels
record where they quantize, and the whole step is one CUDA graph. So a part is what a decode step takes *more with it
than without it*, on one engine, in steps that differ in nothing else::

    forward             the step over a BF16 KV cache, nothing recorded
    kv_dequantization   the same over the FP4 cache of the spec, less that
    wa_guidance         the same with the experts' outcomes recorded, less that; and gathering them at the end
    kv_guidance         nothing in a step, because the cache is the record; reading codes and scales at the end
    frames              copying what was gathered to the host and making frames of it; overlaps with steps

What happens once, at the end of a sequence, counts for the step by its rows: a step of ``B`` sequences makes ``B`` of
them. Steps are replayed in turn and their differences taken pair by pair, so that a clock that drifts does not look
like a part. A difference may be negative: an FP4 cache has fewer bytes to read, and where that gains more than widening
costs, ``kv_dequantization`` says by how much. Shares count such a part as nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from tracefp4.core import KV_KINDS, Kind
from tracefp4.evaluation.steps import Steps, in_turn, more
from tracefp4.guidance.plan import Plan
from tracefp4.rollout.admission import recorded_shapes

PARTS = ("forward", "kv_dequantization", "wa_guidance", "kv_guidance", "frames")
"""Parts in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a decode step by part."""

    plan: Plan | None
    batch: int
    context: int
    seconds: dict[str, float]
    """By part, in the order of :data:`PARTS`; below 0 where the step is faster with the part than without."""

    @property
    def shares(self) -> dict[str, float]:
        """Of all parts; one that costs nothing has none."""
        positive = {part: max(seconds, 0.0) for part, seconds in self.seconds.items()}
        total = max(sum(positive.values()), 1e-12)
        return {part: seconds / total for part, seconds in positive.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = "none" if self.plan is None else str(self.plan)
        about = {"plan": plan, "batch": self.batch, "context": self.context}
        return about | {"seconds": self.seconds, "shares": self.shares}


def breakdown(steps: Steps, plan: Plan | None, repeats: int = 5) -> Breakdown:
    """Take the step apart.

    Args:
        steps: of a warm engine.
        plan: what is recorded; ``None`` for nothing.
        repeats: replays of a step in each of five rounds.
    """
    experts, cache = _split(steps, plan)
    plain = steps.step()
    dense = steps.step(dense=True) if steps.engine.spec.kv is not None else plain
    recording = plain if experts is None else steps.step(experts)
    few = max(1, min(repeats, 3))
    chosen = list({id(step): step for step in (dense, plain, recording)}.values())
    found = {id(step): seconds for step, seconds in zip(chosen, in_turn(chosen, repeats), strict=True)}
    bare, quantized, recorded = (found[id(step)] for step in (dense, plain, recording))
    seconds = {
        "forward": median(bare),
        "kv_dequantization": more(quantized, bare),
        "wa_guidance": more(recorded, quantized) + steps.gathering(experts, few),
        "kv_guidance": steps.gathering(cache, few),
        "frames": steps.framing(plan or None, few),
    }
    return Breakdown(plan, steps.batch, steps.context, seconds)


def _split(steps: Steps, plan: Plan | None) -> tuple[Plan | None, Plan | None]:
    """The plan's sites of the experts, and those of the KV cache, as far as the spec has them."""
    layout, spec = steps.engine.layout, steps.engine.spec
    there = {shape.site.kind for shape in recorded_shapes(layout, spec, plan)}

    def part(kinds: Collection[Kind]) -> Plan | None:
        if plan is None or not kinds:
            return None
        spans = tuple((kind, span) for kind, span in plan.spans if kind in kinds)
        return replace(plan, kinds=tuple(kinds), spans=spans)

    return part(there - set(KV_KINDS)), part(there & set(KV_KINDS))
