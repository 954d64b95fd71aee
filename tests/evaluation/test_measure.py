"""``measure`` on a tiny model: the rows that it promises, and what must hold between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tracefp4.core import Kind, Rollout
from tracefp4.errors import ConfigError
from tracefp4.evaluation import gauge as module
from tracefp4.evaluation.gap import Scored
from tracefp4.evaluation.gauge import Gauge
from tracefp4.evaluation.measure import DEFAULT_ROWS, MeasureSettings, measure
from tracefp4.evaluation.rows import Measurement, Row, gap_row
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.auto import LARGEST, Choice
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.sizes import bytes_per_token
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.rl.statistics import cluster_sums, ratio_bootstrap

SMALL = MeasureSettings(
    model="tiny:qwen3_moe",
    plans=("r4-all+mid/s8@replay", "r1-all+mid/s8", "r1-all+mid/s3", "r1-all:kv", "c1-all+mid/s3"),
    prompts=3,
    samples=2,
    max_new_tokens=12,
    max_batch=4,
    device="cpu",
    own_routes=True,
)


@pytest.fixture(scope="module")
def measured() -> tuple[Measurement, list[Sequence[Rollout]], list[Scored]]:
    """One measurement, with the rollouts and the deltas behind each row.

    On some machines engine and trainer compute a model as small as this one alike to the last bit, and there is nothing
    to measure. So the trainer's embeddings are a thousandth off, as another implementation's might be.
    """
    rollouts: list[Sequence[Rollout]] = []
    deltas: list[Scored] = []
    real = module.score

    def spy(model, sites, given, **kwargs):
        rollouts.append(given)
        weight = model.get_input_embeddings().weight
        own, noise = weight.detach().clone(), torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            weight.mul_(1 + 1e-3 * noise)
            deltas.append(real(model, sites, given, **kwargs))
            weight.copy_(own)
        return deltas[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "score", spy)
        found = measure(SMALL)
    return found, rollouts, deltas


def _row(found: Measurement, name: str, plan: str | None = None, replay: bool = True) -> Row:
    (row,) = [r for r in found.rows if (r.name, r.plan, r.route_replay) == (name, plan, replay)]
    return row


def test_every_row_is_there(measured) -> None:
    found, _, _ = measured
    assert [row.name for row in found.rows] == ["bf16_floor", "fp4_vs_bf16", "qat", *["guided"] * 5, "qat", "guided"]
    assert [row.route_replay for row in found.rows] == [True] * 8 + [False] * 2
    assert found.prompts == 3
    assert found.device == "cpu"
    for row in found.rows:
        assert row.k3 >= 0 and row.mean_abs >= 0
        assert row.min <= row.max
        assert row.k3_ci[0] is not None and row.k3_ci[1] is not None
        assert row.k3_ci[0] <= row.k3 <= row.k3_ci[1]
        assert (row.bytes_per_token is not None) == (row.name == "guided")


def test_guidance_narrows_the_gap(measured) -> None:
    found, _, _ = measured
    qat, guided = _row(found, "qat"), _row(found, "guided", "r1-all+mid/s8")
    assert guided.k3 <= qat.k3
    assert guided.wrong_code_rate is not None and qat.wrong_code_rate is not None
    assert guided.wrong_code_rate < qat.wrong_code_rate
    assert guided.k3 <= _row(found, "guided", "r1-all:kv").k3
    assert _row(found, "bf16_floor").k3 < _row(found, "fp4_vs_bf16").k3


def test_a_checked_plan_measures_as_its_bits_and_counts_what_it_pulls(measured) -> None:
    found, _, _ = measured
    sent, checked = (_row(found, "guided", f"{word}1-all+mid/s3") for word in "rc")
    same = ("k3", "k3_ci", "mean_abs", "max", "min", "p999", "wrong_code_rate", "scale_check_failures", "code_steps")
    for name in same:
        assert getattr(sent, name) == getattr(checked, name), name
    assert sent.pulled_share is None and checked.pulled_share is not None and 0 < checked.pulled_share < 1
    layout, spec = describe(tiny_model("qwen3_moe")), get_spec(found.spec)
    sizes = (bytes_per_token(Plan.parse(row.plan or ""), layout.site_shapes(spec), 2) for row in (sent, checked))
    assert sent.bytes_per_token == next(sizes)
    assert checked.bytes_per_token is not None and checked.bytes_per_token > next(sizes)


def test_replayed_codes_are_the_rollouts(measured) -> None:
    found, _, _ = measured
    assert _row(found, "guided", "r4-all+mid/s8").wrong_code_rate == 0.0
    differences = [s["relative_difference"] for s in found.sites if s["decoder"] == "replay"]
    assert differences and max(differences) == 0.0


def test_rows_differ_in_the_trainer_alone(measured) -> None:
    found, rollouts, deltas = measured
    assert all(given is rollouts[1] for given in rollouts[2:])
    assert rollouts[0] is not rollouts[1]
    assert [len(d) for d in deltas[1].deltas] == [len(r.response_ids) for r in rollouts[1]]
    assert found.tokens == sum(len(r.response_ids) for r in rollouts[1])


def test_intervals_resample_prompts(measured) -> None:
    found, rollouts, deltas = measured
    numbers = [0, 0, 1, 1, 2, 2]
    assert [r.request_id for r in rollouts[1]] == [f"measure-{n}" for n in numbers]
    delta = deltas[2].all
    clusters = np.repeat(numbers, [len(d) for d in deltas[2].deltas])
    expected = ratio_bootstrap(*cluster_sums(np.expm1(delta) - delta, clusters))
    row = _row(found, "qat")
    assert (row.k3, row.k3_ci) == (expected.estimate, (expected.low, expected.high))
    assert expected.clusters == 3


def test_one_prompt_has_no_interval() -> None:
    scored = Scored([np.array([0.1, -0.2]), np.array([0.0])], [np.zeros(2), np.zeros(1)])
    row = gap_row("qat", scored, [0, 0], plan=None, decoder=None, replay=True, size=None)
    assert row.k3_ci == (None, None)
    assert row.mean_abs == pytest.approx(0.1)
    assert row.wrong_code_rate is None


def test_sites_are_reported_for_each_quantized_row(measured) -> None:
    found, _, _ = measured
    qat = [s for s in found.sites if s["row"] == "qat"]
    assert [(s["layer"], s["kind"]) for s in qat] == [
        (layer, kind) for layer in (0, 1) for kind in sorted(("experts_in", "experts_mid", "k", "v"))
    ]
    assert all({"flip_rate", "scale_mismatch", "relative_difference", "wrong_code_rate"} <= s.keys() for s in qat)


def test_bytes_grow_with_the_plan(measured) -> None:
    found, _, _ = measured
    sizes = [row.bytes_per_token for row in found.rows if row.plan and row.route_replay]
    whole, one_bit, congruent, kv, _ = sizes
    assert whole > one_bit > congruent > kv > 0


def test_mxfp8_activations_are_measured_with_their_guidance() -> None:
    notes: list[str] = []
    found = measure(
        MeasureSettings("tiny:qwen3_moe", "mxfp4-w4a8-kv4", prompts=2, samples=1, max_new_tokens=4, device="cpu"),
        notes.append,
    )
    assert {s["kind"] for s in found.sites} == {"k", "v", "experts_in", "experts_mid"}
    assert len([row for row in found.rows if row.name == "guided"]) == len(DEFAULT_ROWS)
    replayed = _first(found, "r4-all+mid/s8", "replay")
    assert replayed.wrong_code_rate == 0.0
    # In two layers K and V of two heads, 32 values each, experts' inputs of 64 and two intermediates of 96: four bits a
    # value and one byte for 32 of them.
    assert replayed.bytes_per_token == 2 * (2 * 2 * 32 + 64 + 2 * 96) * (1 / 2 + 1 / 32)


@pytest.mark.parametrize("spec", ["nvfp4-w4a4-kv4", "mxfp4-w4a8-kv4", "mxfp4-w4a4-kv4", "nvfp4-w4a4", "nvfp4-kv4"])
def test_guidance_corrects_codes_under_every_spec(spec: str) -> None:
    sizes = {"prompts": 6, "samples": 2, "max_new_tokens": 12, "device": "cpu"}
    found = measure(
        MeasureSettings("tiny-moe", spec, plans=("r1-all+mid/s8",) if "a" in spec else ("r1-all/s8",), **sizes)
    )
    rows = {row.name: row for row in found.rows}
    assert rows["guided"].wrong_code_rate < 0.2 * rows["qat"].wrong_code_rate
    assert rows["guided"].k3 < rows["fp4_vs_bf16"].k3


def test_histogram_of_codebook_steps(measured) -> None:
    found, _, _ = measured
    qat = next(row for row in found.rows if row.name == "qat")
    assert sum(qat.code_steps) == pytest.approx(1.0)
    # +0 and -0 are one entry, so a code counts as wrong exactly when it is a step or more away.
    assert 1 - qat.code_steps[0] == pytest.approx(qat.wrong_code_rate)
    assert next(row for row in found.rows if row.name == "bf16_floor").code_steps is None


def _first(found: Measurement, plan: str, decoder: str) -> Row:
    return next(row for row in found.rows if (row.plan, row.decoder) == (plan, decoder))


def test_default_plans_without_a_site_are_left_out_and_named() -> None:
    notes: list[str] = []
    found = measure(
        MeasureSettings("tiny:qwen3_moe", "nvfp4-w4a4", prompts=2, samples=1, max_new_tokens=2, device="cpu"),
        notes.append,
    )
    assert "r1-all:kv" not in {row.plan for row in found.rows}
    assert [note for note in notes if "left out" in note] == [
        "guided r1-all:kv bracket: left out, spec nvfp4-w4a4 has no such site"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plans": ("r1-al",)}, "did you mean 'r1-all'"),
        ({"plans": ("r1-all/s8@brakcet",)}, "did you mean 'bracket'"),
        ({"plans": ("r1-all/s8@replay",)}, "whole codes"),
        ({"plans": ("r1-all:kv",), "spec": "nvfp4-w4a4"}, "selects no site"),
        ({"plans": ("r1-l9",)}, "the model has 2"),
        ({"spec": "bf16"}, "selects no site"),
    ],
)
def test_wrong_plans_are_refused_before_anything_is_generated(changes, message, monkeypatch) -> None:
    monkeypatch.setattr("tracefp4.evaluation.measure._generate", lambda *_: pytest.fail("generated"))
    with pytest.raises(ConfigError, match=message):
        measure(MeasureSettings("tiny:qwen3_moe", device="cpu", **changes))


def test_a_gauge_knows_what_can_be_recorded() -> None:
    model = tiny_model("qwen3_moe")
    kv = {Kind.K, Kind.V}
    assert {shape.site.kind for shape in Gauge(model, get_spec("nvfp4-kv4")).shapes} == kv
    for spec in ("mxfp4-w4a4-kv4", "mxfp4-w4a8-kv4"):
        assert len(Gauge(model, get_spec(spec)).shapes) == 8


def test_a_plan_is_chosen_on_other_prompts_and_keeps_its_bytes() -> None:
    small = replace(SMALL, plans=("auto:120",), prompts=2, samples=1, own_routes=False)
    notes: list[str] = []
    found = measure(small, notes.append)
    (row,) = [row for row in found.rows if row.name == "guided"]
    assert row.bytes_per_token is not None and 0 < row.bytes_per_token <= 120
    assert row.plan is not None and any(f"auto:120: plan {row.plan}, " in text for text in notes)
    assert found.tokens <= 2 * small.max_new_tokens


def test_layers_may_be_left_in_bf16_where_the_spec_names_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen is measured on rollouts of that deployment; a named number is the only one that is tried."""
    real = Gauge.choose

    def choose(gauge: Gauge, *given: Any) -> Choice:
        found = real(gauge, *given)
        return replace(found, gap=found.gap if gauge.spec.bf16_layers else 9.0)

    monkeypatch.setattr(Gauge, "choose", choose)
    small = replace(SMALL, plans=("auto:120", "auto:90", "r1-all:kv"), prompts=2, samples=1, own_routes=False)
    notes: list[str] = []
    found = measure(small, notes.append)
    guided = [(row.plan, row.bf16_layers) for row in found.rows if row.name == "guided"]
    assert [layers for _, layers in guided] == [1, 1, 0]
    assert sum("/b1: " in text and "response tokens" in text for text in notes) == 2  # both budgets share them
    assert any("auto:120, nvfp4-w4a4-kv4/b1: plan " in text and "K and V " in text for text in notes)
    assert any("auto:120: plan " in text and ", 1 layer in BF16, " in text for text in notes)
    for text, layers in (("nvfp4-w4a4-kv4/b0", 0), ("nvfp4-w4a4-kv4/b1", 1)):
        named = measure(replace(small, spec=text, plans=("auto:120",)))
        assert [row.bf16_layers for row in named.rows if row.name == "guided"] == [layers]


def test_bits_stay_with_the_engine_where_everything_would_not_fit() -> None:
    gauge = Gauge(tiny_model("qwen3_moe"), get_spec("nvfp4-w4a4-kv4"))
    everything = bytes_per_token(LARGEST, gauge.shapes, gauge.layout.num_layers)
    small = replace(
        SMALL, plans=(f"auto:{int(0.8 * everything)}", str(LARGEST)), prompts=3, samples=1, own_routes=False
    )
    found = measure(small, lambda _: None)
    chosen, whole = [row for row in found.rows if row.name == "guided"]
    assert chosen.plan is not None and Plan.parse(chosen.plan).checked
    assert chosen.bytes_per_token is not None and chosen.bytes_per_token <= 0.8 * everything
    assert chosen.mean_abs <= 1.5 * whole.mean_abs + 1e-4
