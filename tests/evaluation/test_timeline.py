"""Profiles of steps: what was busy, what waited after what, and differences that add up; and the script around them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tracefp4.evaluation.timeline import DEVICE, HOST, Gap, Profile, difference, gaps, observe, spans_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profile_steps.py"
KERNELS, MORE = "kernels: us, launches, name", "kernels: us more, us against, us, launches against, launches, name"


def event(name, start, duration, cat="kernel", track=7):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": track, "ts": start, "dur": duration}


def profile_of(*events, arm="arm", steps=1, wall=100.0, categories=DEVICE):
    return Profile(arm, steps, wall, wall + 10, spans_of({"traceEvents": list(events)}, categories))


def test_a_gpu_is_busy_while_any_stream_is_and_named_ranges_are_no_work():
    found = profile_of(
        event("a", 10, 20),
        event("copy", 25, 15, "gpu_memcpy", 8),  # half of it beside a
        event("Optimizer.step", 0, 90, "gpu_user_annotation"),
        event("cudaLaunchKernel", 0, 5, "cuda_runtime"),
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 3},
        event("a", 60, 10),
        event("fill", 70, 5, "gpu_memset"),
    )
    assert found.busy_us == (40 - 10) + (75 - 60) and found.idle_us == 110 - 45
    assert gaps(found.spans) == [Gap(20, "copy", "a")]
    assert [(k.name, k.us, k.launches) for k in found.kernels] == [("a", 30, 2), ("copy", 15, 1), ("fill", 5, 1)]


def test_a_short_kernel_beside_a_long_one_does_not_end_it():
    found = profile_of(event("long", 0, 50), event("short", 10, 5, track=8), event("next", 60, 1))
    assert gaps(found.spans) == [Gap(10, "long", "next")] and found.busy_us == 51


def test_operators_have_the_time_of_those_they_call_once():
    found = profile_of(
        event("linear", 0, 100, "cpu_op"), event("t", 5, 10, "cpu_op"), event("addmm", 20, 60, "cpu_op"),
        event("copy", 30, 20, "cpu_op"), event("linear", 100, 10, "cpu_op"), event("linear", 0, 40, "cpu_op", 9),
        event("kernel", 0, 999), categories=HOST,
    )  # fmt: skip
    assert {k.name: k.us for k in found.kernels} == {"linear": 30 + 10 + 40, "addmm": 40, "copy": 20, "t": 10}
    assert found.busy_us == 110 and sum(k.us for k in found.kernels) == 150  # of two threads


def test_figures_are_those_of_one_step_and_gaps_are_the_five_longest():
    found = profile_of(*(event(f"k{i % 2}", 100 * i + 10 * i * i, 10) for i in range(8)), steps=4).to_dict()
    assert found["busy_us"] == 20 and found["kernels_us"] == 20 and found["idle_us"] == 90
    assert found[KERNELS] == [[10, 1, "k0"], [10, 1, "k1"]]
    assert [gap[0] for gap in found["gaps: us, before, after"]] == [90 + 10 * (2 * i + 1) for i in (6, 5, 4, 3, 2)]


def test_differences_add_up_beyond_the_names_that_are_shown():
    base = profile_of(*(event(f"k{i}", 100 * i, i + 1) for i in range(50)), arm="base", wall=5000)
    other = profile_of(
        *(event(f"k{i}", 100 * i, 2 * i + 1) for i in range(5, 50)), event("new", 6000, 700), wall=6000
    )  # fmt: skip
    found = difference(base, other)
    assert (found["arm"], found["against"], found["wall_us"]) == ("arm", "base", 1000)
    rows = found[MORE]
    assert len(rows) == 31 and rows[0] == [700, 0, 700, 0, 1, "new"] and rows[1] == [49, 50, 99, 1, 1, "k49"]
    assert rows[-1][-1] == "(21 others)"
    assert sum(row[0] for row in rows) == found["kernels_us"] == found["busy_us"]
    assert all(row[2] - row[1] == row[0] for row in rows)
    for side, one in ((1, base), (2, other)):
        assert (
            sum(row[side] for row in rows) == one.to_dict()["kernels_us"] == sum(k[0] for k in one.to_dict()[KERNELS])
        )
    gone = difference(other, base)[MORE]
    assert gone[0][0] == -700 and gone[0][4] == 0


def test_observed_are_as_many_steps_as_are_counted(device):
    x, done = torch.ones(64, 64, device=device), []

    def work(steps):
        for _ in range(steps):
            done.append(x @ x)

    work(1)
    found = observe("products", work, 3, device)
    assert len(done) == 1 + 3 + 3 and found.arm == "products"
    assert 0 < found.busy_us <= found.profiled_us and found.wall_us > 0
    if device.type == "cpu":
        assert {k.name: k.launches for k in found.kernels}["aten::mm"] == 1


@pytest.fixture(scope="module")
def script():
    if not SCRIPT.is_file():
        pytest.skip("needs a checkout")
    spec = importlib.util.spec_from_file_location("profile_steps", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


SMALL = {
    "train": ["--batch", "1", "--context", "6", "--arm", "bf16", "--arm", "fp4 guided"],
    "rollout": ["--batch", "4", "--context", "20", "--layers", "1"],
    "decode": ["--batch", "2", "--context", "16", "--layers", "1"],
}
STEPS = ["--device", "cpu", "--shape", "tiny", "--warmup", "1", "--steps", "2"]


@pytest.mark.parametrize("case", SMALL)
def test_the_script_profiles_two_arms_and_their_difference(script, case, tmp_path, capsys):
    path = tmp_path / "new" / "profile.json"
    assert script.main([case, *SMALL[case], *STEPS, "--output", str(path)]) == 0
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    base, other = found["arms"]
    (more,) = found["differences"]
    assert base["arm"] == "bf16" and found["case"] == case and not found["failures"]
    for arm in (base, other):
        assert arm["busy_us"] + arm["idle_us"] == pytest.approx(arm["profiled_us"]) and arm["idle_us"] >= 0
        assert sum(row[0] for row in arm[KERNELS]) == pytest.approx(arm["kernels_us"]) and arm["wall_us"] > 0
        assert len(arm["gaps: us, before, after"]) == 5
        names = {row[2]: row[1] for row in arm[KERNELS]}
        # Each of two steps launches the same, so there is no half a product; those of a rollout may have a copy more.
        assert names["aten::mm"] >= 1 and names["aten::mm"] % 1 == 0
        assert f"\n{arm['arm']}: {arm['wall_us']:.0f} a step" in printed
    for key in ("wall_us", "busy_us", "idle_us", "kernels_us"):
        assert more[key] == pytest.approx(other[key] - base[key])
    assert sum(row[0] for row in more[MORE]) == pytest.approx(more["kernels_us"])
    assert f"\n{other['arm']} less bf16: {more['wall_us']:+.0f} a step" in printed


def test_what_an_arm_found_is_kept_when_the_next_fails(script, tmp_path, monkeypatch, capsys):
    make, path = script.bench_engine.make_engine, tmp_path / "profile.json"

    def broken(part, spec, *rest, **named):
        if spec == "nvfp4-w4a4":
            assert [arm["arm"] for arm in json.loads(path.read_text())["arms"]] == ["bf16"]
            raise RuntimeError("out of memory")
        return make(part, spec, *rest, **named)

    monkeypatch.setattr(script.bench_engine, "make_engine", broken)
    arms = ["--arm", "bf16", "--arm", "nvfp4-w4a4", "--arm", "nvfp4-kv4", "--steps", "1"]
    assert script.main(["decode", *SMALL["decode"], *STEPS, *arms, "--output", str(path)]) == 1
    found = json.loads(path.read_text())
    assert [arm["arm"] for arm in found["arms"]] == ["bf16", "nvfp4-kv4"] and len(found["differences"]) == 1
    assert found["failures"] == ["nvfp4-w4a4: RuntimeError: out of memory"] and found["failures"][0] in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "--arm", "fp4 gided"], "did you mean 'fp4 guided'"),
        (["rollout", "--arm", "nvfp4-kv4", "--shape", "tiny"], "unknown arm"),
        (["decode", "--shape", "30b"], "needs a CUDA device"),
        (["rollout", "--shape", "tiny", "--batch", "2", "--context", "10"], "ask for a longer one"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_one_line(script, words, message, capsys):
    assert script.main([*words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
