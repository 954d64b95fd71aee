"""What recording guidance adds to a decode step, plan by plan, and where the time of a step goes.

One engine serves all of it (:mod:`tracefp4.evaluation.steps`): a plan costs a captured graph, not a model that is made,
packed and compiled once more. Each plan's steps take turns with steps that record nothing, and the detail of its row is
the difference. The breakdown (:mod:`tracefp4.evaluation.breakdown`) is that of the first plan, which by default is the
paper's kind: one bit, the deeper half of the layers.
"""

from __future__ import annotations

from statistics import median

from tracefp4.evaluation.bench import Bench, Row, failures
from tracefp4.evaluation.bench_engine import Slice, arm_of, make_engine, paged, release, tail_seconds, warm
from tracefp4.evaluation.breakdown import breakdown
from tracefp4.evaluation.fill import fill_engine
from tracefp4.evaluation.steps import Step, Steps, in_turn, more
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan

SPEC = "nvfp4-w4a4-kv4"
PLANS = ("r1-half", "r1-all/s8", "r4-all+mid/s8")
"""By default."""


def bench_capture(bench: Bench, part: Slice, batch: int = 64, plans: tuple[str, ...] = ()) -> None:
    """A decode step without guidance and under several plans, and the step by part.

    Args:
        bench: where rows go.
        part: what is measured.
        batch: sequences of a step.
        plans: names of plans; the first is broken down. By default :data:`PLANS`.

    Raises:
        ConfigError: no such plan.
    """
    parsed = [Plan.parse(plan, part.layers) for plan in plans or PLANS]
    case = f"decode {part.measured} B{batch} {part.length}"
    try:
        engine = make_engine(part, SPEC, None, bench.device, batch * paged(part.context), batch)
        warm(engine)
        fill_engine(engine)
        steps = Steps(engine, batch, part.context)
        plain, tail = steps.step(), tail_seconds(bench, engine, batch)
        _row(bench, part, None, plain, batch, tail, median(plain.seconds(bench.repeats)), "not recorded")
    except failures() as error:
        bench.fail(case, arm_of(SPEC), error)
        release()
        return
    for plan in parsed:
        try:
            _recorded(bench, part, steps, plain, plan, tail)
        except failures() as error:
            bench.fail(case, arm_of(SPEC, str(plan)), error)
        release()
    try:
        _parts(bench, part, steps, parsed[0])
    except failures() as error:
        bench.fail(f"breakdown {part.label} B{batch} {part.length}", arm_of(SPEC, str(parsed[0])), error)
    del plain, steps, engine
    release()


def _recorded(bench: Bench, part: Slice, steps: Steps, plain: Step, plan: Plan, tail: float) -> None:
    """One plan's step, beside steps that record nothing."""
    step = steps.step(plan)
    without, recorded = in_turn([plain, step], bench.repeats)
    added = more(recorded, without)
    text = f"{1e6 * added:+.1f} us, {added / median(without):+.2%} of the step without"
    _row(bench, part, plan, step, steps.batch, tail, median(recorded), text)


def _row(
    bench: Bench, part: Slice, plan: Plan | None, step: Step, batch: int, tail: float, seconds: float, detail: str
) -> None:  # fmt: skip
    """The slice's step, and what the whole model's would take."""
    arm, spec = arm_of(SPEC, None if plan is None else str(plan)), get_spec(SPEC)
    hit = step.hit_experts()
    for label, value, layers, source in part.seen(seconds, tail):
        bound = 1e6 * part.sizes(spec, layers).step(batch, part.context, hit) / bench.bandwidth
        text = source if source and not part.complete else detail
        bench.keep(Row(f"decode {label} B{batch} {part.length}", arm, 1e6 * value, "us", bound, detail=text))


def _parts(bench: Bench, part: Slice, steps: Steps, plan: Plan) -> None:
    """The breakdown, a row a part."""
    found = breakdown(steps, plan, bench.repeats)
    for name, seconds in found.seconds.items():
        detail = f"{found.shares[name]:.2%} under {plan}"
        case = f"breakdown {part.label} B{steps.batch} {part.length}"
        bench.keep(Row(case, name.replace("_", " "), 1e6 * seconds, "us", detail=detail))
