"""The capability table: which site which quantization path of an engine exposes, and what is recorded here.

Where codes exist outside of a kernel depends on the backend: some quantize the experts' input in a call of its own,
which a plugin can watch; most quantize the input of the down projection inside a fused kernel, where the codes are born
and die. A plan that asks for a site that a backend fuses away cannot be served, and says so before anything runs. The
table is shown at start; what was never run on the hardware in question is marked as expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.wire import SiteLine


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


def check_plan(plan: Plan | None, lines: Iterable[SiteLine]) -> None:
    """Refuse a plan with a site that this backend fuses away.

    Raises:
        EngineError: naming the site and the plan without it.
    """
    if plan is None:
        return
    hidden = {line.site: line for line in lines if not line.codes}
    for kind in plan.kinds:
        line = hidden.get(str(kind))
        if line is None or line.state == "not quantized":
            continue
        left = tuple(k for k in plan.kinds if k != kind)
        rest = f"; plan {str(Plan(plan.bits, plan.depth, left, plan.scale_bits))!r} leaves it out" if left else ""
        raise EngineError(f"plan {str(plan)!r} records {Kind(kind)}, which {line.path} fuses away{rest}")
