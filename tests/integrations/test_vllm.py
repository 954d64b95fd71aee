"""Parts of the vLLM plugin that need no running engine."""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch

from tracefp4.core import Kind
from tracefp4.errors import ConfigError, EngineError, GuidanceCorrupt
from tracefp4.formats import e2m1, e4m3
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.vllm.arguments import block_size, check_layout, check_options, read_arguments
from tracefp4.integrations.vllm.capturer import TraceCapturer, install, pack_rows, row_bytes, unpack_rows
from tracefp4.integrations.vllm.native import native_lines, site_table
from tracefp4.integrations.vllm.observe import Watch, requantize
from tracefp4.integrations.vllm.rewind import RewindingGenerator, mark_generators
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.admission import recorded_shapes
from tracefp4.rollout.capture import Capture

SPEC = get_spec("nvfp4-w4a4-kv4")
LAYOUT = describe(tiny_model("qwen3_moe"))
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm._version") is None,
    reason="vLLM is not installed here",
)


def recorder(plan="r4-all:experts+mid"):
    device = torch.device("cpu")
    sizes = {"slots": 32, "step_tokens": 8, "dtype": torch.bfloat16, "device": device}
    return Recorder(LAYOUT, SPEC, Plan.parse(plan), MemoryStore(), **sizes)


def capture(slots, plan="r1-all+mid"):
    return Capture(LAYOUT, recorded_shapes(LAYOUT, SPEC, Plan.parse(plan)), 1, slots, torch.device("cpu"))


# -- What vLLM may be asked for


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("speculative_config", {"method": "ngram"}, "speculative decoding"),
        ("pipeline_parallel_size", 2, "pipeline parallelism"),
        ("tensor_parallel_size", 2, "tensor parallelism"),
        ("async_scheduling", True, "a step ahead"),
        ("enable_lora", True, "LoRA"),
        ("kv_cache_dtype", "fp8", "the spec says"),
        ("enforce_eager", False, "hooks"),
    ],
)
def test_options_that_guidance_cannot_follow_are_refused_by_name(option, value, words):
    with pytest.raises(EngineError, match=words) as error:
        check_options({option: value})
    assert f"rollout.options.{option}" in str(error.value)


def test_other_options_pass():
    check_options({"tensor_parallel_size": 1, "enforce_eager": True, "max_logprobs": 5, "enable_lora": False})


def test_pages_grow_to_blocks_that_the_attention_reads():
    assert [block_size(n, "cpu") for n in (1, 16, 32, 33)] == [32, 32, 32, 64]
    assert [block_size(n, "cuda") for n in (1, 16, 20)] == [16, 16, 32]


def test_arguments_of_the_host_are_checked():
    with pytest.raises(ConfigError, match="blocks"):
        read_arguments({"dtype": "bfloat16", "device": "cpu", "block_size": 32})


@pytest.mark.parametrize(("family", "words"), [("deepseek_v3", "latent"), ("qwen3_next", "linear attention")])
def test_models_without_one_slot_a_token_are_refused(family, words):
    with pytest.raises(EngineError, match=words):
        check_layout(describe(tiny_model(family)))


# -- The capability table


def test_the_table_names_what_is_recorded_and_what_is_fused_away():
    here = {line.site: line.state for line in site_table(SPEC, Plan.parse("r1-all"), "cpu")}
    assert here == {"experts_in": "recorded", "experts_mid": "not planned", "k": "recorded", "v": "recorded"}
    plain = {line.state for line in site_table(get_spec("bf16"), None, "cpu")}
    assert plain == {"not quantized"}
    native = native_lines()
    assert {line.state for line in native} <= {"expected, not run", "fused away", "not quantized"}
    trtllm = {line.site: line.state for line in native if line.path == "flashinfer_trtllm"}
    assert trtllm == {"experts_in": "expected, not run", "experts_mid": "fused away"}


# -- Rows in vLLM's side channel


def filled(count, seed=0):
    found = capture(count)
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(torch.randint(0, 100, p.shape, generator=generator).to(p.dtype) for p in found.take(count))
    found.put(torch.arange(count), parts)
    return found


def test_rows_survive_the_side_channel():
    step = filled(6)
    rows = pack_rows(step, 5)
    assert rows.dtype is torch.uint8
    assert rows.shape == (5, row_bytes(step))
    other = capture(9)
    unpack_rows(rows, other)
    assert all(torch.equal(a, b) for a, b in zip(step.take(5), other.take(5), strict=True))
    # Blocks are stored and joined row by row: any two parts are the whole.
    again = capture(9)
    unpack_rows(torch.cat([rows[:2], rows[2:]]), again)
    assert all(torch.equal(a, b) for a, b in zip(step.take(5), again.take(5), strict=True))


def test_rows_of_another_plan_are_refused():
    with pytest.raises(GuidanceCorrupt, match="bytes each"):
        unpack_rows(pack_rows(filled(4), 4)[:, :-1], capture(4))


def test_the_capturer_answers_what_vllm_asks_of_one():
    step = capture(8)
    made = TraceCapturer(step, LAYOUT.moe_layers)
    worker = types.SimpleNamespace(RoutedExpertsCapturer=None)
    install(worker, made)
    assert worker.RoutedExpertsCapturer(max_num_batched_tokens=8, vllm_config=None) is made
    ids = torch.tensor([[3, 1], [0, 7], [5, 2]], dtype=torch.int32)
    for layer in LAYOUT.moe_layers:
        made.capture(layer, ids + layer)
    rows = made.snapshot_routing_data(3)
    assert rows.shape == (3, *made.shape_per_token)
    assert made.output_dtype is rows.dtype
    made.capture(0, torch.zeros_like(ids))  # A snapshot does not change with the next step.
    back = capture(3)
    unpack_rows(rows, back)
    assert torch.equal(back.routes[:, 1].int(), ids + 1)
    assert torch.equal(back.routes[:, 0].int(), ids)


# -- vLLM's own emulation, watched


def test_what_the_emulation_rounds_is_recorded_token_by_token_and_slot_by_slot():
    found = recorder()
    watch = Watch(lambda: found)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, LAYOUT.hidden, generator=generator).bfloat16()
    h = torch.randn(3 * LAYOUT.top_k, LAYOUT.intermediate, generator=generator).bfloat16()
    slots, tokens = torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    scales = {id(x): torch.tensor([700.0]), id(h): torch.tensor([500.0])}

    def kernel():
        return [watch.quantize_input(lambda a, s, *_: (a, s), a, scales[id(a)], "nvfp4", False) for a in (x, h)]

    found.begin(slots, torch.arange(3), tokens)
    out = [watch.experts(kernel, layer) for layer in LAYOUT.moe_layers]
    assert out[0][0][0] is x
    found.keep(found.end())
    for site, value, vectors in ((Kind.EXPERTS_IN, x, 1), (Kind.EXPERTS_MID, h, LAYOUT.top_k)):
        table = found.mirror.table
        runs = dict(zip((table.of(run)[0].site.kind for run in table.runs), found.mirror.read(slots), strict=True))
        rows = runs[site]
        expected = requantize(value, scales[id(value)])
        assert torch.equal(rows.scales[1].flatten(), expected.scales.flatten())
        assert torch.equal(rows.global_scale[1].flatten(), expected.global_scale.flatten())
        assert rows.planes.shape[:3] == (len(LAYOUT.moe_layers), 3, vectors)


def test_an_emulation_that_rounds_otherwise_is_refused():
    found = recorder()
    watch = Watch(lambda: found)
    x = torch.ones(2, LAYOUT.hidden, dtype=torch.bfloat16)

    def kernel(scale):
        return watch.quantize_input(lambda a, s: a, x, scale)

    with pytest.raises(EngineError, match="with one scalar each"):
        watch.experts(kernel, 0, torch.ones(8))
    assert kernel(None) is x  # Outside of experts it is none of ours.


@needs_vllm
@pytest.mark.engine
def test_the_emulations_arithmetic_is_our_preset_bit_for_bit():
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 512, generator=generator) * torch.randn(512, 1, generator=generator).exp()
    x[3], x[5, :16] = 0.0, 0.0
    for values in (x.bfloat16(), x.float()):
        scale = 448 * 6 / values.float().abs().max().reshape(1)
        codes, scales = ref_nvfp4_quant(values, scale, 16)
        ours = requantize(values, scale)
        assert torch.equal(e4m3.decode(ours.scales), scales)
        assert torch.equal(e2m1.decode(ours.codes).abs(), codes.abs())
        assert torch.equal(e2m1.decode(ours.codes), codes)


# -- Seeds


def test_a_draw_that_was_thrown_away_is_taken_back():
    plain, rewinding = torch.Generator().manual_seed(5), RewindingGenerator(device="cpu").manual_seed(5)
    expected = torch.rand(3, generator=plain)
    rewinding.mark()
    torch.rand(1, generator=rewinding)
    rewinding.set_offset(rewinding.get_offset() - 4)  # As vLLM does.
    assert torch.equal(torch.rand(3, generator=rewinding), expected)


def test_generators_of_a_batch_are_replaced_and_only_discarded_draws_rewind():
    requests = {name: types.SimpleNamespace(generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}
    batch = types.SimpleNamespace(
        generators={i: requests[name].generator for i, name in enumerate("ab")}, req_ids=["a", "b"]
    )
    discarded = types.SimpleNamespace(np=[True, False])
    runner = types.SimpleNamespace(input_batch=batch, requests=requests, discard_request_mask=discarded)
    mark_generators(runner)
    first = [torch.rand(1, generator=batch.generators[i]) for i in range(2)]
    assert requests["a"].generator is batch.generators[0]
    batch.generators[0].set_offset(0)
    second = [torch.rand(1, generator=batch.generators[i]) for i in range(2)]
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
