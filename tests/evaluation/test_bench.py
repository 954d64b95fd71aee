"""Benchmarks of the engine on small shapes and a CPU: every row is there, and bytes are counted right."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from typer.testing import CliRunner

from tracefp4.cli import bench as command
from tracefp4.cli.bench_options import CASES, USES
from tracefp4.cli.main import app, load_command
from tracefp4.core import Request, SamplingParams
from tracefp4.errors import ConfigError
from tracefp4.evaluation import (
    bench_capture,
    bench_engine,
    bench_frames,
    bench_kernels,
    bench_prefill,
    bench_rollout,
    rounding_peers,
)
from tracefp4.evaluation.bench import Bench, Row
from tracefp4.evaluation.bench_prefill import prefill_flops
from tracefp4.evaluation.bench_shapes import SHAPES, Sizes, random_model, sizes
from tracefp4.evaluation.steps import Steps, decode_rows
from tracefp4.formats import blocks
from tracefp4.formats.numerics import get_numerics
from tracefp4.formats.spec import get_spec
from tracefp4.rollout.embedded import EmbeddedEngine

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(Bench, "bandwidth", 1e9)
    monkeypatch.setattr(Bench, "launch", 1e-6)
    monkeypatch.setattr(Bench, "product_rate", 1e12)
    return Bench(CPU, repeats=1)


def test_sizes_of_the_30b_shape_are_those_of_the_model():
    bf16, fp4 = (sizes("30b", 48, get_spec(spec)) for spec in ("bf16", "nvfp4-w4a4-kv4"))
    assert bf16.weights == pytest.approx(2 * 30.53e9, rel=1e-3)
    assert bf16.token == 96 * 1024 and fp4.token == 27 * 1024 and bf16.state == 0
    assert fp4.experts == bf16.experts * 4.5 / 16 and fp4.dense == bf16.dense
    # 120 GiB hold 84 sequences of 8K beside bfloat16 weights.
    assert (bf16.fits(120 * GIB, 8192), fp4.fits(120 * GIB, 8192)) == (84, 483)
    assert bf16.fits(20 * GIB, 8192) == 0


def test_sizes_of_the_35b_shape_have_its_states():
    whole = sizes("35b", 40, get_spec("bf16"))
    assert whole.weights == pytest.approx(2 * 34.66e9, rel=5e-3)
    assert whole.token == 20 * 1024
    assert whole.state == pytest.approx(60 * (1 << 20), rel=0.05)
    halved = sizes("35b", 40, get_spec("bf16"), "bfloat16")
    # 30 layers, 32 heads of 128 x 128; what is left are inputs of the convolution, bfloat16 either way.
    matrices = 30 * 32 * 128 * 128
    assert whole.state - 4 * matrices == halved.state - 2 * matrices == 30 * 2 * 8192 * 4
    part = sizes("35b", 8, get_spec("bf16"))
    assert part.token == whole.token / 5 and part.state == whole.state / 5


def test_experts_of_a_skewed_draw():
    from tracefp4.evaluation.bench_experts import draw_experts

    counts = []
    for skew in (0.0, 1.0):
        chosen = draw_experts(2000, 32, 4, skew, CPU)
        assert all(len(row.unique()) == 4 for row in chosen[:50])
        assert torch.equal(chosen, draw_experts(2000, 32, 4, skew, CPU))
        counts.append(torch.bincount(chosen.flatten(), minlength=32).sort(descending=True)[0])
    assert counts[0][0] < 1.3 * counts[0][-1]
    # Without replacement, the first is in most tokens' four and the last in few.
    assert counts[1][0] > 1200 and counts[1][0] > 8 * counts[1][-1]


def test_a_step_reads_hit_experts_once_and_all_of_the_context():
    one = Sizes(dense=100, embedding=7, experts=800, num_experts=8, top_k=2, token=3, state=5)
    assert one.step(1, 10) == 100 + 800 * 2 / 8 + 30 + 10
    assert one.step(2, 10) == 100 + 800 * (1 - 0.75**2) + 2 * 40
    assert one.uniform(2) == 8 * (1 - 0.75**2) and one.step(2, 10, one.uniform(2)) == one.step(2, 10)
    assert one.step(2, 10, 4.0) == 100 + 800 / 2 + 2 * 40
    assert one.fits(907 + 3 * 35 + 34, 10) == 3


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_the_engine_computes_what_transformers_does(name):
    """The models of the benchmark, unquantized: the engine against the untouched model over the whole sequence."""
    config, plain = SHAPES[name].config(4), SHAPES[name].config(4)
    models = []
    for one in (config, plain):
        torch.manual_seed(3)
        models.append(random_model(one, CPU, torch.float32))
        for parameter in models[-1].parameters():
            parameter.data.mul_(4.0 if parameter.ndim > 1 else 1.0)
    engine = EmbeddedEngine(models[0], None, get_spec("bf16"), max_tokens=512, max_batch=4, prefill_chunk=16)
    requests = [
        Request(str(i), tuple(range(3 + i, 24 + i)), 2, SamplingParams(max_new_tokens=6, seed=i)) for i in (0, 1)
    ]
    for rollout in engine.generate(requests):
        with torch.no_grad():
            logits = models[1](input_ids=torch.tensor([rollout.tokens[:-1]]), use_cache=False).logits[0]
        table = torch.log_softmax(logits, -1)[len(rollout.prompt_ids) - 1 :]
        expected = table.gather(1, torch.tensor(rollout.response_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


def test_states_in_bfloat16_have_rows_and_a_bound_of_their_own(bench, monkeypatch):
    kept, made = [], bench_engine.fill_engine

    def fill(engine):
        made(engine)
        kept.append({recurrent.dtype for _, recurrent in engine.states._states.values()})

    monkeypatch.setattr(bench_engine, "fill_engine", fill)
    for dtype in ("float32", "bfloat16"):
        part = bench_engine.slice_of("tiny-hybrid", None, 64, state_dtype=dtype)
        bench_engine.bench_decode(bench, part, (2,), arms=("bf16", "nvfp4-w4a4-kv4"))
    assert kept == [{torch.float32}, {torch.float32}, {torch.bfloat16}, {torch.bfloat16}]
    found = bench.to_dict()
    assert not found["failures"]
    rows = {(row["name"], row["arm"]): row for row in found["rows"]}
    # Three gated delta nets; two bytes of each value less, read and written, for two sequences, at 1 GB/s.
    config = SHAPES["tiny-hybrid"].config(4)
    matrix = config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    for arm in ("bf16", "fp4 nvfp4-w4a4-kv4"):
        plain, narrow = (rows[f"decode tiny-hybrid 4/8 layers{s} B2 64", arm] for s in ("", " states bfloat16"))
        if plain["numbers"]["hit_experts"] == narrow["numbers"]["hit_experts"]:
            assert plain["bound"] - narrow["bound"] == pytest.approx(1e6 * 2 * 2 * 2 * 3 * matrix / 1e9)
        limited = [rows[f"decode tiny-hybrid whole{s} memory-limited 64", arm] for s in ("", " states bfloat16")]
        fits = [row["numbers"]["batch"] for row in limited]
        spec = "bf16" if arm == "bf16" else arm.removeprefix("fp4 ")
        budget = SHAPES["tiny-hybrid"].budget * GIB
        assert fits == [sizes("tiny-hybrid", 8, get_spec(spec), d).fits(budget, 64) for d in ("float32", "bfloat16")]
        assert fits[0] < fits[1]


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_decode_rows(bench, name):
    part = bench_engine.slice_of(name, None, 64)
    bench_engine.bench_decode(bench, part, (1, 2), arms=("bf16", "nvfp4-w4a4-kv4"))
    found = bench.to_dict()
    assert not found["failures"]
    rows = {(row["name"], row["arm"]): row for row in found["rows"]}
    label, fp4 = part.label, "fp4 nvfp4-w4a4-kv4"
    for batch in (1, 2):
        for case in (label, f"{name} whole"):
            row = rows[f"decode {case} B{batch} 64", fp4]
            assert row["value"] > 0 and row["bound"] > 0 and row["ratio_to_bf16"] > 0
    whole = sizes(part.name, part.shape.layers, get_spec("bf16"))
    limited = rows[f"decode {name} whole memory-limited 64", "bf16"]
    batch = whole.fits(part.shape.budget * GIB, 64)
    assert limited["detail"].startswith(f"B{batch} in") and limited["unit"] == "tok/s"
    hit = limited["numbers"]["hit_experts"]
    assert limited["bound"] == pytest.approx(batch * 1e9 / whole.step(batch, 64, hit))
    assert 2 <= hit <= 4 and limited["numbers"]["uniform_experts"] == pytest.approx(4, rel=1e-3)
    assert limited["numbers"]["batch"] == batch and limited["numbers"]["tok_s"] == limited["value"]
    assert "from" in limited["detail"]
    assert rows[f"KV a token {label}", fp4]["value"] == sizes(part.name, part.layers, get_spec("nvfp4-kv4")).token
    assert rows[f"weights {label}", "bf16"]["value"] == pytest.approx(
        rows[f"weights {label}", "bf16"]["bound"], rel=0.05
    )


def test_a_slice_with_all_layers_is_the_whole_model(bench):
    part = bench_engine.slice_of("tiny", 4, 64)
    bench_engine.bench_decode(bench, part, (2,), arms=("bf16",))
    assert [row.name for row in bench.rows[2:]] == ["decode tiny whole B2 64", "decode tiny whole memory-limited 64"]
    assert all(row.detail.endswith("all 4 layers") and row.numbers["layers"] == 4 for row in bench.rows[2:])
    assert bench.rows[3].numbers["batch"] == sizes("tiny", 4, get_spec("bf16")).fits(part.shape.budget * GIB, 64)


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_an_arm_is_gone_before_the_next_one_is_made(bench, monkeypatch, name):
    """Two whole models do not fit side by side: nothing of an engine outlives its arm."""
    alive, make = [], bench_engine.make_engine

    def watched(*args):
        assert not [ref for ref in alive if ref() is not None]
        engine = make(*args)
        alive.extend(weakref.ref(tensor) for tensor in (*engine.model.parameters(), engine.pool._stack.codes))
        return engine

    monkeypatch.setattr(bench_engine, "make_engine", watched)
    bench_engine.bench_decode(bench, bench_engine.slice_of(name, 4, 32), (1,), arms=("bf16", "nvfp4-w4a4-kv4", "bf16"))
    assert not bench.failures and not [ref for ref in alive if ref() is not None] and len(alive) > 30


@pytest.mark.parametrize("spec", ["bf16", "nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4"])
def test_tokens_differ_and_nothing_that_a_step_reads_is_zero(bench, spec):
    part = bench_engine.slice_of("tiny-hybrid", 4, 32)
    engine = bench_engine.make_engine(part, spec, None, CPU, 96 * 32, 96)
    bench_engine.warm(engine)
    bench_engine.fill_engine(engine)
    rows = decode_rows(engine, 96, 32)
    assert len({row.token for row in rows}) == 96
    assert [row.token for row in rows] == [row.token for row in decode_rows(engine, 96, 32)]
    kv = engine.pool.read(engine.layout.kv_layers[0], torch.arange(96 * 32))
    for x in kv.values():
        assert 0.9 < x.float().std() < 1.1 and (x.flatten(1) != 0).any(1).all()
    states = engine.states._states.values()
    assert len(states) == 3 and all((x.flatten(1) != 0).any(1).all() for pair in states for x in pair)
    step = Steps(engine, 96, 32).own()
    assert all(seconds > 0 for seconds in step.seconds(1))
    chosen = engine.capture.routes[[row.pages[-1] * 16 + 15 for row in rows]]
    assert step.hit_experts() == sum(len(layer.unique()) for layer in chosen.unbind(1)) / chosen.shape[1] > 2


def test_a_budget_that_holds_nothing_is_said(bench):
    part = bench_engine.slice_of("tiny", 1, 64)
    bench_engine.bench_decode(bench, part, (1,), 1e-6, ("bf16",))
    assert "do not hold one sequence" in bench.to_dict()["failures"][0]


def test_the_peer_generates_on_the_same_slice(bench, monkeypatch):
    monkeypatch.setattr("tracefp4.evaluation.bench_peer._MANY", 8)
    part = bench_engine.slice_of("tiny", 1, 64)
    bench_engine.bench_decode(bench, part, (2,), 0, ("bf16", "transformers"))
    found = bench.to_dict()
    row = next(row for row in found["rows"] if row["arm"] == "transformers")
    assert not found["failures"] and row["name"] == f"decode {part.label} B2 64" and row["ratio_to_bf16"] is not None


def test_rollout_rows_and_their_bound(bench):
    bench_rollout.bench_rollout(bench, "tiny", prompts=2, samples=2, new_tokens=8, prompt_length=8, layers=1)
    found = bench.to_dict()
    assert not found["failures"] and [row["arm"] for row in found["rows"]] == [
        "bf16",
        "fp4 nvfp4-w4a4-kv4",
        "fp4 nvfp4-w4a4-kv4 r1-all+mid/s3",
        "fp4 nvfp4-w4a4-kv4 r1-all+mid/s3 all claimed",
    ]
    recorded, claimed = found["rows"][2:]
    assert 0 < claimed["value"] < recorded["value"] and claimed["bound"] == recorded["bound"]
    assert claimed["detail"].startswith("4 frames, ")
    part = bench_engine.slice_of("tiny", 1, 16)
    moved, launched = bench_rollout.step_bounds(bench, part, "bf16", 4, 8)
    assert launched == pytest.approx(18e-6)
    assert found["rows"][0]["bound"] == pytest.approx(4 * 8 / (7 * max(moved, launched)))


def test_frames_are_timed_beside_copy_and_hash(bench):
    bench_frames.bench_frames(bench, "tiny", 3, 20)
    assert [row.arm for row in bench.rows] == [
        "write", "read", "write side by side", "read side by side", "stage side by side",
    ]  # fmt: skip
    assert all(row.value > 0 and row.bound > 0 and row.unit == "GB/s" for row in bench.rows)
    write, read = bench.rows[:2]
    assert write.bound < read.bound and "MB a frame" in write.detail


def test_the_four_precisions_by_weights_alone_too(bench):
    """Experts and KV cache each in BF16 and NVFP4: what a combination keeps follows from the two."""
    part = bench_engine.slice_of("tiny", 1, 64)
    arms = ("bf16", "nvfp4-kv4", *bench_engine.WEIGHTS_ALONE)
    bench_engine.bench_decode(bench, part, (2,), 0, arms)
    found = bench.to_dict()
    assert not found["failures"] and {"nvfp4-w4a4", "nvfp4-w4a4-kv4"} < set(bench_engine.ARMS)
    kept = {(row["name"].split()[0], row["arm"]): row["bound"] for row in found["rows"] if row["unit"] != "us"}
    weights, cache = ([kept[name, bench_engine.arm_of(arm)] for arm in arms] for name in ("weights", "KV"))
    assert weights[0] == weights[1] > weights[2] == weights[3] > weights[4] == weights[5]
    assert cache[0] == cache[2] == cache[4] > cache[1] == cache[3] > cache[5]
    assert sum(row["unit"] == "us" for row in found["rows"]) == 2 * len(arms)


def test_prefill_rows(bench):
    bench_prefill.bench_prefill(bench, bench_engine.slice_of("tiny", 2, 35), 2)  # no whole number of pages
    assert not bench.failures and [row.unit for row in bench.rows] == ["tok/s"] * 3
    assert [row.arm for row in bench.rows] == ["bf16", "fp4 nvfp4-w4a4-kv4", "transformers"]
    assert len({row.name for row in bench.rows}) == 1 and all(row.bound > row.value > 0 for row in bench.rows)


def test_a_compiled_peer_of_prefill_needs_whole_prompts(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(bench_prefill, "peer_prefill", lambda *args: asked.append(args[-1]) or (lambda: None))
    part = bench_engine.slice_of("tiny", 1, 32, True)
    bench_prefill.bench_prefill(bench, part, 2, 64, ("bf16", "transformers"))
    bench_prefill.bench_prefill(bench, part, 2, 16, ("transformers",))
    assert not bench.failures and asked == [False, True, False] and "compiled was left out" in bench.notes[0]
    assert [row.arm for row in bench.rows] == ["bf16", "transformers", "transformers compiled", "transformers"]
    # The engine compiles decode steps alone, so no row of it says compiled.
    assert {row.name for row in bench.rows} == {f"prefill tiny 1/4 layers 2x32 chunk {chunk}" for chunk in (16, 64)}


def test_prefill_in_chunks_reads_weights_and_the_cache_once_a_chunk(bench):
    part = bench_engine.slice_of("tiny", 2, 100)
    bench_prefill.bench_prefill(bench, part, 3, 40, ("bf16", "transformers"))
    assert not bench.failures and bench.rows[0].name == "prefill tiny 2/4 layers 3x100 chunk 40"
    size = Sizes(dense=1000, embedding=7, experts=800, num_experts=4, top_k=2, token=3, state=5)
    case = bench_prefill.Prefill(part, 3, 40)
    # 300 tokens are eight forward passes; of a prompt 40, 80 and 100 tokens are read.
    weights = 1000 + 800 * (1 - 0.5**40)
    assert case.nbytes(size) == pytest.approx(8 * weights + 3 * (100 * 3 + 220 * 3 + 2 * 3 * 5))
    assert bench_prefill.Prefill(part, 3, 512).nbytes(size) == pytest.approx(1800 + 3 * (200 * 3 + 10))


def test_operations_of_prefill_are_those_of_the_products():
    """Counted by PyTorch over the model as transformers runs it, which masks half of the scores and computes all."""
    from torch.utils.flop_counter import FlopCounterMode

    config, length = SHAPES["tiny"].config(2), 48
    model = random_model(config, CPU, torch.float32)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None], use_cache=False, logits_to_keep=1)
    masked = 2 * 4 * config.num_attention_heads * config.head_dim * length * (length - 1) / 2
    norms = 2 * (5 * config.hidden_size + 4 * config.head_dim) * length  # a product each, which it does not count
    assert prefill_flops("tiny", 2, 1, length) + masked - norms == counter.get_total_flops()


def test_capture_rows_and_the_parts_of_a_step(bench):
    shown = []
    bench.show = shown.append
    part = bench_engine.slice_of("tiny", 2, 35)
    bench_capture.bench_capture(bench, part, 2)
    assert not bench.failures and len(shown) == len(bench.rows)
    plain, *plans = [row for row in bench.rows if row.name == f"decode {part.label} B2 35"]
    assert plain.arm == "fp4 nvfp4-w4a4-kv4"
    assert [row.arm.split()[-1] for row in plans] == ["r1-l1", "r1-all/s8", "r4-all+mid/s8"]
    assert all("of the step without" in row.detail for row in plans)
    parts = {row.arm: row.value for row in bench.rows if row.name.startswith("breakdown")}
    assert list(parts) == ["forward", "kv dequantization", "wa guidance", "kv guidance", "frames"]
    assert parts["forward"] > 0 and parts["kv guidance"] > 0 and parts["frames"] > 0


def test_a_capture_of_other_plans_names_the_wrong_one(bench):
    part = bench_engine.slice_of("tiny", 1, 32)
    bench_capture.bench_capture(bench, part, 1, ("r1-all:kv",))
    assert [row.arm.split()[-1] for row in bench.rows[2:4]] == ["r1-all:kv"] * 2
    with pytest.raises(ConfigError, match="did you mean"):
        bench_capture.bench_capture(bench, part, 1, ("r9-all",))


def test_the_command_runs_a_tiny_shape_and_refuses_large_ones_without_a_gpu(tmp_path):
    run = CliRunner()
    arguments = ["bench", "decode", "--device", "cpu", "--shape", "tiny", "--context", "32", "--batch", "1"]
    arguments += ["--arm", "bf16", "--layers", "1", "--repeats", "1", "--budget", "0", "--json"]
    result = run.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    names = {row["name"] for row in json.loads(result.stdout)["rows"]}
    assert {"decode tiny 1/4 layers B1 32", "weights tiny 1/4 layers"} <= names
    for wrong, message in (("30b", "needs a CUDA device"), ("35", "did you mean '35b'")):
        result = run.invoke(app, ["bench", "decode", "--device", "cpu", "--shape", wrong])
        assert result.exit_code != 0 and message in str(result.exception or result.output)


def bench_of(*words):
    result = CliRunner().invoke(app, ["bench", *words, "--device", "cpu", "--repeats", "1", "--json"])
    return json.loads(result.stdout)["rows"] if result.exit_code == 0 else str(result.exception or result.output)


VALUES = {
    "batch": "2", "context": "32", "shape": "tiny", "arm": "bf16", "budget": "0", "state-dtype": "float32",
    "skew": "1", "rows": "16", "layers": "1", "chunk": "16",
}  # fmt: skip
"""A value for each option that takes one; the others are flags."""


@pytest.mark.parametrize("case", CASES)
def test_no_option_is_ignored_without_a_word(case, monkeypatch):
    """A case refuses each option that it has no use for, and none that it has; nothing is measured before."""
    called = []
    monkeypatch.setattr(command, "_measure", lambda wanted, *rest: called.append(wanted) or {"rows": []})
    monkeypatch.setattr(command, "emit", lambda *a, **k: None)
    monkeypatch.setattr(command, "_table", lambda found: "")
    options = {option for used in USES.values() for option in used}
    declared = {parameter.opts[0].removeprefix("--") for parameter in load_command("bench").params}
    assert declared - {"case", "device", "repeats", "output", "json"} == options
    for option in sorted(options):
        words = [f"--{option}", *([VALUES[option]] if option in VALUES else [])]
        result = CliRunner().invoke(app, ["bench", case, *words])
        if option in USES[case]:
            assert result.exit_code == 0, result.output
            continue
        message = str(result.exception)
        assert f"bench {case} does not use --{option}, which is for " in message
        assert all(f"--{own}" in message for own in USES[case]) and "\n" not in message
    assert len(called) == len(USES[case])


def test_batches_and_contexts_are_swept():
    common = ["--shape", "tiny", "--layers", "1"]
    sweep = ["--batch", "1", "--batch", "2", "--context", "16", "--context", "24"]
    rows = bench_of("decode", *common, *sweep, "--arm", "bf16", "--budget", "0")
    cases = [(batch, context) for context in (16, 24) for batch in (1, 2)]
    fixed = [row["name"] for row in rows if row["name"].startswith("decode tiny 1/4")]
    assert fixed == [f"decode tiny 1/4 layers B{batch} {context}" for batch, context in cases]
    rows = bench_of("prefill", *common, *sweep, "--chunk", "32", "--arm", "bf16")
    assert {row["name"] for row in rows} == {f"prefill tiny 1/4 layers {b}x{c} chunk 32" for b, c in cases}
    rows = bench_of("frames", "--shape", "tiny", *sweep)
    assert {row["name"] for row in rows} == {f"frames tiny {b}x{c - 1}" for b, c in cases}


@pytest.mark.parametrize("case", ["prefill", "decode", "capture"])
def test_a_tiny_shape_runs_by_default(case):
    small = ["--layers", "1", *(["--batch", "1"] if case != "prefill" else [])]
    rows = bench_of(case, "--shape", "tiny", *small, *(["--arm", "bf16"] if case == "decode" else []))
    assert isinstance(rows, list) and rows, rows


def test_rounding_stands_beside_torchaos(bench):
    pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is a development extra")
    bench_kernels.bench_qat(bench, 8, 64)
    assert not [line for line in bench.failures if "no kernel" not in line]
    rows = {(row.name, row.arm): row for row in bench.rows}
    assert {name for name, arm in rows if arm == "torchao nvfp4"} == {"round", "round to codes"}
    # Two bytes in and two out; codes are four bits and a share of a scale's eight.
    assert rows["round", "torchao mxfp4"].bound == pytest.approx(1e6 * 4 * 512 / 1e9)
    assert rows["round to codes", "torchao nvfp4"].bound == pytest.approx(1e6 * 2.5625 * 512 / 1e9)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = blocks.quantize(x.float(), get_numerics("mxfp4-ceil")).dequantize(torch.bfloat16)
    assert torch.equal(rounding_peers._works("mxfp4", "values")(x), ours)


def test_torchao_may_be_missing(bench, monkeypatch):
    monkeypatch.setattr(rounding_peers.importlib.util, "find_spec", lambda name: None)
    rounding_peers.bench_torchao(bench, [])
    assert bench.notes == ["torchao was left out: it is not installed"] and not bench.rows and not bench.failures


def test_rows_come_out_as_they_are_measured():
    result = CliRunner().invoke(app, ["bench", "codec", "--device", "cpu", "--rows", "16", "--repeats", "1", "--json"])
    assert "pack r1, fp4: " in result.stderr and json.loads(result.stdout)["notes"] == []


def test_the_best_of_one_has_nothing_in_brackets(bench):
    assert bench.best("case", "one", [("alone", [lambda: 0])], 1.0) == "alone"
    slow = [lambda: sum(range(100000))]
    assert bench.best("case", "two", [("slow", slow), ("fast", [lambda: 0])], 1.0) == "fast"
    one, two = (row.detail for row in bench.rows)
    assert one == "alone" and two.startswith("fast (slow ") and two.endswith(")")


def test_a_run_that_is_cut_short_keeps_the_rows_that_it_had(tmp_path, monkeypatch):
    path, seen = tmp_path / "new" / "found.json", []

    def cut_short(bench, rows):
        for value in (2.0, 1.0):
            bench.keep(Row("pack", "bf16" if value == 2 else "fp4", value, "us"))
            seen.append(json.loads(path.read_text()))
        bench.fail("unpack", "fp4", "no room")
        bench.note("gone was left out")
        raise KeyboardInterrupt

    monkeypatch.setattr("tracefp4.evaluation.bench_kernels.bench_codec", cut_short)
    words = ["bench", "codec", "--device", "cpu", "--output", str(path)]
    assert CliRunner().invoke(app, words).exit_code != 0
    found = json.loads(path.read_text())
    assert [len(one["rows"]) for one in seen] == [1, 2] and not any(one["finished"] for one in seen)
    assert [row["ratio_to_bf16"] for row in found["rows"]] == [1, 2] and not found["finished"]
    assert found["failures"] == ["unpack, fp4: no room"] and found["notes"] == ["gone was left out"]
    assert found["copy_bandwidth"] is None  # no case had asked for it, and nothing is measured just to write a file
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_run_that_ends_says_so_in_its_file(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    monkeypatch.setattr(Bench, "bandwidth", 1e9)
    words = ["bench", "codec", "--device", "cpu", "--rows", "16", "--repeats", "1", "--json", "--output", str(path)]
    result = CliRunner().invoke(app, words)
    found = json.loads(path.read_text())
    assert found == json.loads(result.stdout) and found["finished"] and found["copy_bandwidth"] == 1e9
