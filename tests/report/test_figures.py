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
