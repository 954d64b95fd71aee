"""The capability table: which site which quantization path of an engine exposes, and what is recorded here.

Where codes exist outside of a kernel depends on the backend: some quantize the experts' input in a call of its own,
which a plugin can watch; most quantize the input of the down projection inside a fused kernel, where the codes are born
and die. A plan that asks for a site that a backend fuses away cannot be served, and says so before anything runs. The
table is shown at start; what was never run on the hardware in question is marked as expected.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from tracefp4.core import EXPERT_KINDS, Kind
from tracefp4.errors import EngineError
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.wire import SiteLine, State


def render_sites(lines: Sequence[SiteLine]) -> str:
    """The table as plain text."""
    header = ("site", "path", "codes", "scales", "here", "note")
    rows = [header] + [
        (x.site, x.path, "yes" if x.codes else "no", "yes" if x.scales else "no", x.state, x.note) for x in lines
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


CACHE = "--kv-cache-dtype nvfp4"
"""Path of K and V where an engine has an FP4 cache of its own."""


def path_lines(name: str, enters: bool, middle: State, note: str) -> list[SiteLine]:
    """The two lines of one of an engine's own paths, none of which has run here.

    Args:
        name: of the path.
        enters: whether the experts' input is rounded outside of a kernel.
        middle: what becomes of the input of the down projection; ``expected, not run`` if it is seen.
        note: for people.
    """
    seen: State = "expected, not run"
    states: dict[Kind, State] = {Kind.EXPERTS_IN: seen if enters else middle, Kind.EXPERTS_MID: middle}
    lines = []
    for kind, state in states.items():
        shown = state == seen
        lines.append(SiteLine(str(kind), name, shown, shown, state, note))
    return lines


def observed_lines(table: Sequence[SiteLine], running: str, missing: Container[str]) -> list[SiteLine]:
    """The table of a process whose own kernels compute.

    Args:
        table: of all paths.
        running: the path that is taken; one that is not in the table shows nothing.
        missing: paths of which a quantizer was not found. They show nothing.
    """
    if all(line.path != running for line in table):
        note = "not in the table of the tested release"
        unknown = [SiteLine(str(kind), running, False, False, "not bound", note) for kind in EXPERT_KINDS]
        return unknown + [line for line in table if line.path == CACHE]
    lost = "a quantizer of it is not there in this release"
    return [
        SiteLine(x.site, x.path, False, False, "not bound", lost) if x.codes and x.path in missing else x
        for x in table
        if x.path in (running, CACHE)
    ]


def check_plan(plan: Plan | None, lines: Iterable[SiteLine], *, observed: bool = False) -> None:
    """Refuse a plan with a site that this backend fuses away.

    Args:
        plan: what is to be recorded.
        lines: of the path that is taken.
        observed: whether the engine's own kernels compute. Then a site that they do not quantize is refused as well; in
            our arithmetic it is one that the spec leaves alone.

    Raises:
        EngineError: naming the site and the plan without it.
    """
    if plan is None:
        return
    hidden = {line.site: line for line in lines if not line.codes}
    for kind in plan.kinds:
        line = hidden.get(str(kind))
        if line is None or (line.state == "not quantized" and not observed):
            continue
        left = tuple(k for k in plan.kinds if k != kind)
        rest = f"; plan {str(Plan(plan.bits, plan.depth, left, plan.scale_bits))!r} leaves it out" if left else ""
        path = line.path or "this backend"
        does = {"fused away": "fuses away", "not quantized": "does not quantize"}.get(line.state, "does not show here")
        raise EngineError(f"plan {str(plan)!r} records {Kind(kind)}, which {path} {does}{rest}")
