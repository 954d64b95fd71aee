"""Figure 14 of the paper, for our engine: output throughput of four precisions of experts and KV cache.

``tracefp4 bench decode --output FILE`` measures decode steps of BF16 and NVFP4 experts by BF16 and NVFP4 KV cache.
Every case of such a file that has all four becomes a figure: a batch at a length of context, or the batch that a budget
of memory holds. Of a model of which some layers were measured only what the whole model would do is drawn.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefp4.errors import ConfigError
from tracefp4.report.bars import Bars, draw_bars
from tracefp4.report.figures import short, to_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CACHES = ("BF16 KV cache", "NVFP4 KV cache")
EXPERTS = {
    "BF16 experts": ("bf16", "fp4 nvfp4-kv4"),
    "NVFP4 experts": ("fp4 nvfp4-w4a4", "fp4 nvfp4-w4a4-kv4"),
}
"""Arms of the benchmark, one for each of :data:`CACHES`."""
COLOURS = ("ink", "blue")


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens a second of one case by arm."""

    name: str
    """As the benchmark's table has it."""
    rates: dict[str, float]
    device: str
    source: str
    """How many layers were measured."""

    @property
    def slug(self) -> str:
        """Name of its file, without a suffix."""
        return "fig14-" + re.sub(r"[^A-Za-z0-9]+", "-", self.name.removeprefix("decode ")).strip("-")

    def draw(self) -> Figure:
        """The figure.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        series = [(label, [self.rates[arm] for arm in arms]) for label, arms in EXPERTS.items()]
        unit = f"output tokens a second, {self.name.removeprefix('decode ')} ({self.source})\n{self.device}"
        title = "Decode throughput by precision"
        bars = Bars("throughput", title, unit, list(CACHES), series, colours=COLOURS, text=short, above=True)
        return draw_bars(bars)


def cases_of(found: dict[str, Any]) -> list[Case]:
    """Cases with all four precisions, in the order of the file."""
    rates: dict[str, dict[str, float]] = {}
    details: dict[str, str] = {}
    for row in found["rows"]:
        rate = row.get("numbers", {}).get("tok_s")
        if rate is not None and row["name"].startswith("decode ") and " whole" in row["name"]:
            rates.setdefault(row["name"], {})[row["arm"]] = rate
            details[row["name"]] = row["detail"]
    wanted = {arm for arms in EXPERTS.values() for arm in arms}
    sources = {name: detail.rpartition(", ")[2] for name, detail in details.items()}
    return [Case(name, has, found["device"], sources[name]) for name, has in rates.items() if wanted <= set(has)]


def draw_benchmark(path: Path, folder: Path | None = None) -> list[Path]:
    """Write the figures of a benchmark's file as PNG files.

    Args:
        path: what ``tracefp4 bench decode --output`` wrote.
        folder: where they go; by default beside the file.

    Returns:
        The files.

    Raises:
        ConfigError: the file is no benchmark's, or has no case with all four precisions; matplotlib is not installed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cases = cases_of(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is no JSON of tracefp4 bench: {type(error).__name__}") from error
    if not cases:
        arms = ", ".join(sorted({arm for arms in EXPERTS.values() for arm in arms}))
        raise ConfigError(f"{str(path)!r} has no decode step of a whole model with all of the arms {arms}")
    written = []
    for case in cases:
        target = (folder or path.parent) / f"{case.slug}.png"
        image = to_png(case.draw())
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(image)
        except OSError as error:
            raise ConfigError(f"{str(target)!r} cannot be written: {error.strerror}") from error
        written.append(target)
    return written
