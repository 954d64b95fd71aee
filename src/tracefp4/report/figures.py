"""One visual style for every plot.

A panel is described as data (title, unit, lines) and drawn by one function, so that all plots of a page, and the same
plot of two runs, look alike. Choices that serve a hurried reader: the title says what is plotted, the line under it
says in which unit; lines are labelled at their end, in their colour, instead of in a legend; a faint line is the raw
value, the bold one its running mean; a quantity that spans decades has a logarithmic axis.

Colours are told apart with the common colour-vision deficiencies (after Okabe and Ito, https://jfly.uni-koeln.de/color/).
For a page they become CSS variables, which is why each is used for nothing else: the same SVG is then readable on a
light and on a dark ground.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tracefp4.errors import ConfigError
from tracefp4.report.run_data import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE: dict[str, tuple[str, str]] = {
    "blue": ("#0b6cb3", "#62b3f2"),
    "orange": ("#cf4f17", "#ff9463"),
    "green": ("#0a8760", "#43cf9f"),
    "purple": ("#96539a", "#d9a0dc"),
    "amber": ("#a87203", "#efbb55"),
    "sky": ("#2f93c9", "#8fd3fb"),
    "ink": ("#1c2530", "#e4e9ef"),
    "muted": ("#5d6a79", "#9aa7b6"),
    "grid": ("#dde3ea", "#323b47"),
}
"""Name of each colour, its value on a light and on a dark ground."""

SERIES_COLOURS = ("blue", "orange", "green", "purple", "amber", "sky")
"""Colours for lines that have no role of their own, in order of use."""

PANEL_SIZE = (5.6, 3.05)
"""Inches of a single panel."""

_FONT = 9.0
_CHARACTER = 0.073  # inches a character of a label takes, at this font size


@dataclass(slots=True)
class Line:
    """One curve of a panel."""

    label: str
    series: Series
    colour: str
    smooth: int = 1
    """Values in the running mean; 1 draws the values themselves."""
    style: Literal["solid", "dashed"] = "solid"
    markers: bool = False
    bars: list[tuple[int, float, float]] = field(default_factory=list)
    """Confidence intervals as (step, low, high)."""
    faint: bool = False
    """A thin pale line without label: one of several seeds behind their mean."""


@dataclass(slots=True)
class Panel:
    """What one plot shows. ``levels`` are horizontal reference lines (label, value)."""

    name: str
    title: str
    unit: str
    lines: list[Line]
    log: bool = False
    symlog: float = 0.0
    """Logarithmic beyond this size and linear below it, for values of either sign; 0 is off."""
    percent: bool = False
    zero: bool = False
    """Start the vertical axis at 0."""
    stacked: bool = False
    levels: list[tuple[str, float]] = field(default_factory=list)


def draw(panels: Sequence[Panel], size: tuple[float, float] | None = None, columns: int | None = None) -> Figure:
    """Draw panels in one figure.

    Args:
        panels: what to draw, left to right and then down.
        size: inches; by default :data:`PANEL_SIZE` a panel.
        columns: panels beside each other; by default all of them.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    columns = min(columns or len(panels), len(panels))
    lines = -(-len(panels) // columns)
    width, height = size or (PANEL_SIZE[0] * columns, PANEL_SIZE[1] * lines)
    with drawing((width, height)) as figure:
        share, tall = width / columns, height / lines
        for index, panel in enumerate(panels):
            row, column = divmod(index, columns)
            right = 0.25 + _CHARACTER * max((len(text) for text, _, _ in _labels(panel)), default=0)
            bottom = (lines - 1 - row) * tall + 0.42
            box = (
                (column * share + 0.62) / width,
                bottom / height,
                (share - 0.62 - right) / width,
                (tall - 1.14) / height,
            )
            _draw_panel(figure.add_axes(box), panel, (box[2] * width, box[3] * height))
    return figure


@contextmanager
def drawing(size: tuple[float, float]) -> Iterator[Figure]:
    """An empty figure of ``size`` inches, to be drawn in this module's style within the ``with`` block.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install it with: pip install 'tracefp4[report]'") from error
    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure


def heading(axes: Axes, title: str, unit: str, inches: tuple[float, float], left: float = 0.5) -> None:
    """Title and unit over axes that measure ``inches``; they begin ``left`` inches left of the plot area."""
    height, offset = 0.62 / inches[1], -left / inches[0]
    axes.text(offset, 1 + height, title, transform=axes.transAxes, fontsize=_FONT + 2, fontweight="bold", va="top")
    axes.text(offset, 1 + height * 0.58, unit, transform=axes.transAxes, color=PALETTE["muted"][0], va="top")


def to_svg(figure: Figure, name: str, *, themed: bool = True) -> str:
    """SVG text of a figure; the same input gives the same text.

    Args:
        figure: from :func:`draw`.
        name: makes the ids within the SVG unique on a page.
        themed: colours as CSS variables (for a page) instead of fixed values (for a file).
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_style(), "svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=themed, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    if themed:
        for colour, (light, _) in PALETTE.items():
            text = text.replace(light, f"var(--{colour})")
    return text.replace("'DejaVu Sans'", "inherit" if themed else "'DejaVu Sans', sans-serif")


def to_png(figure: Figure, dpi: int = 160) -> bytes:
    """PNG bytes of a figure, on white."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_style()):
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def short(value: float, *, percent: bool = False) -> str:
    """A value as a label says it: ``0.74``, ``8.1e-4``, ``12 400``, ``98 %``."""
    if percent:
        return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.01:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.2f}" if size < 10 else f"{value:.1f}"


def share_text(value: float) -> str:
    """A share in per cent, to two significant digits: ``86 %``, ``4.2 %``, ``0.031 %``, ``3e-8``."""
    percent = 100 * value
    if percent == 0:
        return "0"
    if percent < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-")
    if percent < 0.01:
        return f"{percent:.1g} %"
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        means.append(total / min(index + 1, window))
    return means


def _style() -> dict[Any, Any]:
    ink, muted, grid = PALETTE["ink"][0], PALETTE["muted"][0], PALETTE["grid"][0]
    return {
        "font.size": _FONT,
        "font.family": "DejaVu Sans",
        "text.color": ink,
        "axes.edgecolor": muted,
        "axes.labelcolor": muted,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "lines.solid_capstyle": "round",
    }


def _draw_panel(axes: Axes, panel: Panel, inches: tuple[float, float]) -> None:
    """Draw into ``axes``, whose plot area measures ``inches`` (width, height)."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    heading(axes, panel.title, panel.unit, inches)
    if panel.log:
        axes.set_yscale("log")
    elif panel.symlog:
        axes.set_yscale("symlog", linthresh=panel.symlog, linscale=0.4)
    if panel.stacked:
        _draw_stack(axes, panel)
    else:
        for line in panel.lines:
            _draw_line(axes, line)
    for _, level in panel.levels:
        axes.axhline(level, color=PALETTE["muted"][0], linestyle=(0, (4, 3)), linewidth=1.1)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.margins(x=0.01)
    if panel.log:
        _whole_decades(axes)
    elif panel.symlog:
        _decades_of_both_signs(axes, panel.symlog)
    elif panel.zero:
        # The margin that an axis has by itself is a share of the range of the lines, which may be narrow.
        axes.set_ylim(0, 1.05 * max(axes.dataLim.y1, *(level for _, level in panel.levels), 0.0) or 1.0)
    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    elif not (panel.log or panel.symlog):
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    _label_ends(axes, panel, inches[1])


def _whole_decades(axes: Axes) -> None:
    """End a logarithmic axis at powers of ten: an axis within one decade would have no readable ticks."""
    low, high = axes.get_ylim()
    axes.set_ylim(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)))


def _decades_of_both_signs(axes: Axes, threshold: float) -> None:
    """Ticks at 0 and the powers of ten from ``threshold`` on; the axis ends at half decades, on one side maybe at 0."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    low, high = axes.dataLim.y0, axes.dataLim.y1
    ends = [_outward(size, threshold) for size in (max(-low, 0.0), max(high, 0.0))]
    if not any(ends):
        ends[1] = threshold
    axes.set_ylim(-ends[0], ends[1])
    largest = math.floor(math.log10(max(ends) / threshold) + 1e-9)
    sizes = [threshold * 10.0**power for power in range(largest + 1)]
    axes.yaxis.set_major_locator(FixedLocator([-size for size in reversed(sizes)] + [0.0] + sizes))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(FixedLocator([]))


def _outward(size: float, threshold: float) -> float:
    """The next half decade above ``threshold`` that holds ``size`` with some room; 0 for 0."""
    if size == 0:
        return 0.0
    halves = 2 * math.log10(max(1.1 * size, threshold) / threshold)
    return threshold * 10.0 ** (math.ceil(halves - 1e-9) / 2)


def _draw_line(axes: Axes, line: Line) -> None:
    colour = PALETTE[line.colour][0]
    steps, values = line.series.steps, line.series.values
    dash: Any = "solid" if line.style == "solid" else (0, (4, 2))
    if line.faint:
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.35)
        return
    for step, low, high in line.bars:
        axes.plot([step, step], [low, high], color=colour, linewidth=1.4, alpha=0.6)
    marker = "o" if line.markers or len(steps) < 3 else ""
    if line.smooth > 1:
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.35)
        values = running_mean(values, line.smooth)
    axes.plot(steps, values, color=colour, linewidth=2.0, linestyle=dash, marker=marker, markersize=4)


def _draw_stack(axes: Axes, panel: Panel) -> None:
    steps = panel.lines[0].series.steps
    base = [0.0] * len(steps)
    for line in panel.lines:
        top = [low + value for low, value in zip(base, line.series.values, strict=True)]
        axes.fill_between(steps, base, top, color=PALETTE[line.colour][0], alpha=0.75, linewidth=0)
        base = top
    axes.set_ylim(0, 1.05 * max(base) or 1.0)


def _labels(panel: Panel) -> list[tuple[str, float, str]]:
    """Text, height and colour of the label at the end of each line."""
    found: list[tuple[str, float, str]] = []
    base = 0.0
    for line in panel.lines:
        if line.faint or not line.series:
            continue
        value = running_mean(line.series.values, line.smooth)[-1]
        text = f"{line.label} {short(line.series.mean() if panel.stacked else value, percent=panel.percent)}".strip()
        if panel.stacked:
            text += " s"
        found.append((text, base + value / 2 if panel.stacked else value, line.colour))
        base += value
    return found + [(f"{label} {short(value)}", value, "muted") for label, value in panel.levels]


def _label_ends(axes: Axes, panel: Panel, height: float) -> None:
    """Write the labels right of the plot at the height of their lines, moved apart where they would overlap."""
    labels = [label for label in _labels(panel) if math.isfinite(label[1])]
    gap = 1.3 * _FONT / 72 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    placed = sorted((float(to_axes.transform((x, y))[1]), text, colour) for text, y, colour in labels)
    heights = spread([y for y, _, _ in placed], gap)
    for y, (_, text, colour) in zip(heights, placed, strict=True):
        axes.annotate(
            text,
            (1, y),
            xytext=(5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=PALETTE[colour][0],
            va="center",
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights within 0..1 apart until neighbours are ``gap`` from each other, as little as needed."""
    placed = [min(max(height, 0.0), 1.0) for height in heights]
    for _ in range(100):
        moved = False
        for index in range(len(placed) - 1):
            overlap = gap - (placed[index + 1] - placed[index])
            if overlap > 1e-6:
                placed[index] -= overlap / 2
                placed[index + 1] += overlap / 2
                moved = True
        if not moved:
            break
    return placed
