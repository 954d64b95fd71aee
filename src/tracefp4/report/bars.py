"""Bars, in the style of :mod:`tracefp4.report.figures`: values that are compared, not curves that are followed.

Every bar says its value, so no axis has to be read. Stacked bars are horizontal, one a row, with the names of their
parts over the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracefp4.report.figures import PALETTE, SERIES_COLOURS, drawing, heading, share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LEGEND_COLUMNS = 3
"""Entries of the legend of stacked bars in a line; more of them do not fit the width."""


@dataclass(slots=True)
class Bars:
    """Grouped or stacked bars, of shares from 0 to 1 unless they say otherwise."""

    name: str
    title: str
    unit: str
    groups: list[str]
    """What stands along the axis; rows of stacked bars."""
    series: list[tuple[str, list[float]]]
    """Label and one value a group; parts of stacked bars."""
    stacked: bool = False
    colours: tuple[str, ...] = SERIES_COLOURS
    """One a series."""
    text: Callable[[float], str] = share_text
    """What is written at a value."""
    above: bool = False
    """The legend of grouped bars stands over the plot, where the highest bars are on the right."""


def draw_bars(bars: Bars, size: tuple[float, float] = (7.2, 3.05)) -> Figure:
    """Draw one figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    height = max(1.5, 1.0 + 0.5 * len(bars.groups)) if bars.stacked else size[1]
    extra = 0.22 if bars.stacked and len(bars.series) > LEGEND_COLUMNS else 0.0
    height += extra
    with drawing((size[0], height)) as figure:
        left = (0.3 + 0.085 * max(map(len, bars.groups))) if bars.stacked else 0.45
        box = (left / size[0], (0.42 + extra) / height, 1 - (left + 0.3) / size[0], 1 - (1.14 + extra) / height)
        axes = figure.add_axes(box)
        inches = (box[2] * size[0], box[3] * height)
        heading(axes, bars.title, bars.unit, inches, left=left - 0.12)
        axes.grid(visible=False)
        (_stacked if bars.stacked else _grouped)(axes, bars)
    return figure


def _grouped(axes: Axes, bars: Bars) -> None:
    width = 0.8 / len(bars.series)
    for index, ((label, values), colour) in enumerate(zip(bars.series, bars.colours, strict=False)):
        places = [group + (index - (len(bars.series) - 1) / 2) * width for group in range(len(values))]
        axes.bar(places, values, width * 0.92, color=PALETTE[colour][0], label=label)
        for x, value in zip(places, values, strict=True):
            axes.annotate(
                bars.text(value),
                (x, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=PALETTE[colour][0],
            )
    axes.set_xticks(range(len(bars.groups)), bars.groups)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.12)
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": "linecolor", "handlelength": 0.8}
    if bars.above:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(bars.series), **style)
    else:
        axes.legend(loc="upper right", **style)


def _stacked(axes: Axes, bars: Bars) -> None:
    rows = range(len(bars.groups))
    base = [0.0] * len(bars.groups)
    for (label, values), colour in zip(bars.series, bars.colours, strict=False):
        axes.barh(rows, values, 0.62, left=base, color=PALETTE[colour][0], label=f"{label} {bars.text(values[0])}")
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_yticks(rows, bars.groups)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.set_xlim(0, max(base))
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(0, -0.02),
        ncols=min(len(bars.series), LEGEND_COLUMNS),
        fontsize=8,
        labelcolor="linecolor",
        handlelength=0.8,
        columnspacing=1.2,
        borderpad=0,
    )
