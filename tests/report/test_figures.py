"""Plots: labels, scales, determinism, and the drawing helpers."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.report import figures, panels
from tracefp4.report.figures import Line, Panel
from tracefp4.report.run_data import Series, read_run


def test_themed_svg_has_variables_and_no_fixed_palette(write_run):
    panel = panels.mismatch(read_run(write_run()))
    svg = figures.to_svg(figures.draw([panel]), "mismatch")
    assert svg.startswith("<svg")
    assert "var(--orange)" in svg
    assert not any(light in svg for light, _ in figures.PALETTE.values())
    for text in ("Train-rollout mismatch", "without guidance", "guided", "BF16 floor 1.4e-3"):
        assert text in svg


def test_same_input_gives_the_same_svg(write_run):
    panel = panels.reward(read_run(write_run()))
    assert figures.to_svg(figures.draw([panel]), "a") == figures.to_svg(figures.draw([panel]), "a")


def test_png_of_several_panels(write_run):
    run = read_run(write_run())
    data = figures.to_png(figures.draw([panels.reward(run), panels.mismatch(run)]))
    assert data.startswith(b"\x89PNG")


@pytest.mark.parametrize("build", panels.PANELS)
def test_every_panel_draws_long_short_and_single_step_runs(build, write_run):
    for steps in (1, 2, 40):
        run = read_run(write_run(f"r{steps}", steps=steps))
        panel = build(run)
        assert panel is not None
        assert "<svg" in figures.to_svg(figures.draw([panel]), panel.name)


def test_mismatch_is_on_whole_decades(write_run):
    figure = figures.draw([panels.mismatch(read_run(write_run(method="bf16")))])
    low, high = figure.axes[0].get_ylim()
    assert figure.axes[0].get_yscale() == "log"
    assert math.log10(low) == pytest.approx(round(math.log10(low)))
    assert math.log10(high) - math.log10(low) >= 1


@pytest.mark.parametrize("values", [[12.0, 12.1], [0.0, 0.0], [3.0, 300.0]])
def test_an_axis_from_zero_ends_above_its_lines(values):
    line = Line("a", Series([0, 1], values), "blue")
    low, high = figures.draw([Panel("p", "Length", "tokens", [line], zero=True)]).axes[0].get_ylim()
    assert low == 0 and high >= 1.05 * max(values) and high > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_small_and_large_values_of_either_sign_are_told_apart(sign):
    """On a linear axis 0.5 and 0.7 would fall together beside 26."""
    lines = [Line(str(v), Series([0, 1], [sign * v, sign * v]), "blue") for v in (0.5, 0.7, 26.0)]
    axes = figures.draw([Panel("p", "Largest", "nats", lines, symlog=0.1)]).axes[0]
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = sorted(float(to_axes.transform((0, sign * v))[1]) for v in (0.0, 0.5, 0.7, 26.0))
    assert heights[0] >= 0 and heights[-1] <= 1 + 1e-9
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.03
    ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    assert [abs(tick) for tick in ticks][::sign] == [0.0, 0.1, 1.0, 10.0]


def test_a_logarithmic_axis_of_both_signs_takes_any_values():
    for values in ([0.0, 0.0], [-0.02, 0.01], [-5.0, 700.0]):
        axes = figures.draw([Panel("p", "t", "u", [Line("a", Series([0, 1], values), "blue")], symlog=0.1)]).axes[0]
        low, high = axes.get_ylim()
        assert low <= min(values) and high >= max(values) and low < high


def test_zeros_do_not_reach_a_logarithmic_axis():
    assert panels.positive(Series([0, 1, 2], [0.0, 1e-3, -1.0])) == Series([1], [1e-3])


def test_all_zero_stack_draws():
    line = Line("sync", Series([0, 1], [0.0, 0.0]), "blue")
    assert figures.draw([Panel("t", "Time", "seconds", [line], stacked=True)])


def test_missing_metrics_depend_on_the_method(write_run):
    guided, plain = read_run(write_run("a")), read_run(write_run("b", method="bf16"))
    assert panels.missing_metrics(guided) == []
    assert panels.missing_metrics(plain) == []
    for row in guided.rows:
        del row["guidance/flip_rate"], row["entropy"]
    assert panels.missing_metrics(guided) == ["entropy", "guidance/flip_rate"]
    assert panels.entropy(guided) is None


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        (0.0, False, "0"),
        (8.14e-4, False, "8.1e-4"),
        (0.737, False, "0.74"),
        (31.14, False, "31.1"),
        (12345.6, False, "12 346"),
        (0.0312, True, "3.1 %"),
        (0.98, True, "98 %"),
    ],
)
def test_short(value, percent, text):
    assert figures.short(value, percent=percent) == text


def test_running_mean():
    assert figures.running_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert figures.running_mean([1, 2], 1) == [1, 2]


@given(st.lists(st.floats(-0.5, 1.5), max_size=6))
def test_spread_keeps_order_and_distance(heights):
    placed = figures.spread(sorted(heights), 0.08)
    assert all(b - a >= 0.079 for a, b in itertools.pairwise(placed))
