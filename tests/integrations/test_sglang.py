"""Our side of SGLang, with stand-ins of its signatures; the real engine is in tests/engines."""

from __future__ import annotations

import ast
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.sites import check_plan
from tracefp4.integrations.sglang.engine import check_options
from tracefp4.integrations.sglang.native import (
    EXPERTS,
    PATHS,
    available,
    bind_observers,
    native_lines,
    observed,
    running_path,
)
from tracefp4.integrations.sglang.observe import NativePool, Watch
from tracefp4.integrations.sglang.plugin import same_architecture
from tracefp4.integrations.sglang.seeds import give_seeds, hash32
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.quantizers.nearest import quantize_nearest

SPEC = get_spec("nvfp4-w4a4-kv4", "nvfp4-flashinfer-exact")


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Pool:
    """SGLang's NVFP4 pool: packed codes and linear scales by layer, the first axis the slot."""

    start_layer = 0

    def __init__(self, layers, slots, heads, width):
        def bytes_of(size):
            return [torch.randint(0, 120, (slots, heads, size), dtype=torch.uint8) for _ in range(layers)]

        self.k_buffer, self.v_buffer = bytes_of(width // 2), bytes_of(width // 2)
        self.k_scale_buffer, self.v_scale_buffer = bytes_of(width // 16), bytes_of(width // 16)


@pytest.fixture
def native():
    layout = describe(tiny_model("qwen3_moe"))
    pool = Pool(layout.num_layers, 32, layout.kv_heads, layout.head_dim)
    recorder = Recorder(
        layout,
        SPEC,
        Plan.parse("r4-all/s8"),
        MemoryStore(),
        slots=32,
        step_tokens=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        pool=NativePool(lambda: pool),
    )
    return recorder, pool


def run_experts(watch, layer, *calls, **attributes):
    """Call hooks as SGLang's experts of ``layer`` would meet them."""
    module = SimpleNamespace(layer_id=layer, **attributes)
    watch.experts(lambda module, *_: [hook(*arguments) for hook, arguments in calls], module, None, None)


def recorded(recorder, watch, *calls, **attributes):
    """Record one pass of three tokens and read it back."""
    slots, tokens = torch.tensor([4, 7, 9]), [1, 2, 3]
    recorder.begin(slots, torch.arange(3), torch.tensor(tokens))
    for layer in range(recorder.layout.num_layers):
        run_experts(watch, layer, *calls, **attributes)
    recorder.keep(recorder.end())
    found = recorder.collect(slots, [*tokens, 8], "key")
    return decode(recorder.store.get(found.guidance)), found


@pytest.mark.parametrize("how", ["fp4_quantize", "padded", "tiled", "per_token"])
def test_codes_of_a_native_quantizer_are_recorded_as_they_are(native, how):
    recorder, pool = native
    x = torch.randn(3, recorder.layout.hidden).bfloat16()
    scale = torch.tensor([7.0]) if how != "per_token" else None
    q = quantize_nearest(x, SPEC.activations, None if scale is None else scale.expand(3, 1))
    packed, watch = e2m1.pack(q.codes), Watch(lambda: recorder)
    scales = q.scales.view(torch.float8_e4m3fn)
    if how == "fp4_quantize":
        call = watch.fp4_quantize, ((packed, scales), x, scale, 16, False, False)
    elif how == "padded":
        wide = torch.nn.functional.pad(packed, (0, 32)), torch.nn.functional.pad(q.scales, (0, 4))
        call = watch.fp4_quantize, (wide, x, scale, 16, False, False)
    elif how == "tiled":
        call = watch.fp4_quantize, ((packed, tile(q.scales)), x, scale)
    else:
        call = watch.per_token, ((packed, scales, torch.reciprocal(q.global_scale.flatten())), x)
    record, found = recorded(recorder, watch, call)
    assert found.invalid_rows == 0
    for layer in range(recorder.layout.num_layers):
        outcome = record.sites[Site(layer, Kind.EXPERTS_IN)].outcome()
        assert torch.equal(outcome.low, q.codes)
        assert torch.equal(outcome.scales, q.scales)
        torch.testing.assert_close(outcome.global_scale, q.global_scale.expand(3, 1), rtol=1e-6, atol=0)
        for kind, codes in ((Kind.K, pool.k_buffer), (Kind.V, pool.v_buffer)):
            kept = record.sites[Site(layer, kind)].outcome()
            assert torch.equal(e2m1.pack(kept.low), codes[layer][[4, 7, 9]].flatten(0, 1))


def tile(scales):
    """Scales ``(rows, blocks)`` of less than a tile of rows, in tiles."""
    rows, blocks = scales.shape
    whole = torch.zeros(128, -(-blocks // 4) * 4, dtype=torch.uint8)
    whole[:rows, :blocks] = scales
    return whole.view(4, 32, -1, 4).permute(2, 1, 0, 3).contiguous()


@pytest.fixture
def masked():
    """Three tokens behind DeepEP's low latency dispatch: a bin of four rows for each expert."""
    layout = describe(tiny_model("qwen3_moe"))
    shape = {"slots": 32, "step_tokens": 8, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    plan, spec = Plan.parse("r4-all:experts+mid"), get_spec("nvfp4-w4a4", "nvfp4-flashinfer-exact")
    return Recorder(layout, spec, plan, MemoryStore(), **shape)


def binned(values, experts, bins, scale):
    """Values ``(P, width)`` of token and slot pairs in bins, as FlashInfer's grouped quantizers return them."""
    source, counts = torch.full((bins, 4), 77), torch.zeros(bins, dtype=torch.int32)
    packed = torch.zeros(bins, 4, values.shape[1] // 2, dtype=torch.uint8)
    scales = torch.zeros(bins, 4, values.shape[1] // 16, dtype=torch.uint8)
    q = quantize_nearest(values, SPEC.activations, scale[experts.flatten()].unsqueeze(1))
    for pair in reversed(range(len(values))):
        expert, token = int(experts.flatten()[pair]), pair // experts.shape[1]
        row = int(counts[expert])
        packed[expert, row], scales[expert, row] = e2m1.pack(q.codes[pair]), q.scales[pair]
        source[expert, row] = token
        counts[expert] += 1
    tiled = torch.stack([tile(part) for part in scales]).view(bins, 1, -1, 32, 4, 4)
    return (packed.permute(1, 2, 0), tiled.permute(3, 4, 1, 5, 2, 0)), (source, counts), q


@pytest.mark.parametrize("rounded_at_dispatch", [False, True])
def test_rows_by_expert_are_recorded_token_by_token_and_slot_by_slot(masked, rounded_at_dispatch):
    layout, watch = masked.layout, Watch(lambda: masked)
    generator = torch.Generator().manual_seed(6)
    experts = torch.tensor([[5, 0], [0, 2], [2, 5]])
    x = torch.randn(3, layout.hidden, generator=generator).bfloat16()
    h = torch.randn(6, layout.intermediate, generator=generator).bfloat16()
    one, own = torch.full((layout.num_experts,), 700.0), torch.arange(layout.num_experts) * 50.0 + 400
    entered, (source, counts), q_in = binned(x.repeat_interleave(2, 0), experts, layout.num_experts, one)
    middle, _, q_mid = binned(h, experts, layout.num_experts, own)
    hidden = entered if rounded_at_dispatch else (torch.zeros(layout.num_experts, 4, layout.hidden), None)
    output = SimpleNamespace(
        hidden_states=hidden[0], hidden_states_scale=hidden[1], topk_ids=experts, masked_m=counts
    )  # fmt: skip
    dispatcher = SimpleNamespace(group=SimpleNamespace(size=lambda: 1), handle=(source, None))

    def kernel(hidden_states, input_global_scale):
        if not rounded_at_dispatch:
            watch.masked_input(entered, hidden_states[0], counts, input_global_scale)
        watch.masked_middle(middle, None, counts, own)

    calls = (watch.dispatched, (output, dispatcher)), (watch.masked, (kernel, hidden, one))
    record, found = recorded(masked, watch, *calls, w13_input_scale_quant=one[0])
    assert found.invalid_rows == 0
    for layer in range(layout.num_layers):
        for kind, q, step in ((Kind.EXPERTS_IN, q_in, 2), (Kind.EXPERTS_MID, q_mid, 1)):
            outcome = record.sites[Site(layer, kind)].outcome()
            assert torch.equal(outcome.low, q.codes[::step])
            assert torch.equal(outcome.scales, q.scales[::step])
            assert torch.equal(outcome.global_scale.flatten(), q.global_scale.flatten()[::step])


def test_rows_by_expert_that_have_no_single_meaning_are_refused(masked):
    watch = Watch(lambda: masked)
    experts = torch.tensor([[5, 0], [0, 2], [2, 5]])
    own = torch.arange(masked.layout.num_experts) * 50.0 + 400
    entered, (source, counts), _ = binned(torch.randn(6, masked.layout.hidden), experts, len(own), own)
    output = SimpleNamespace(hidden_states=entered[0], hidden_states_scale=1, topk_ids=experts, masked_m=counts)
    dispatcher = SimpleNamespace(group=SimpleNamespace(size=lambda: 1), handle=(source,))
    masked.begin(torch.arange(3), torch.arange(3), torch.arange(3))
    with pytest.raises(EngineError, match="one input scale for all experts"):
        run_experts(
            watch, 0, (watch.dispatched, (output, dispatcher)), (watch.masked_input, (entered, None, None, own))
        )
    with pytest.raises(EngineError, match="not announced"):
        run_experts(watch, 0, (watch.masked_middle, (entered, None, None, own)))
    dispatcher.group = SimpleNamespace(size=lambda: 4)
    with pytest.raises(EngineError, match="over 4 ranks"):
        run_experts(watch, 0, (watch.dispatched, (output, dispatcher)))


def test_before_there_is_a_recorder_nothing_is_looked_at():
    watch = Watch(lambda: None)
    run_experts(watch, 0, (watch.fp4_quantize, ((torch.zeros(1, 8), torch.zeros(1, 1)), None, torch.ones(1))))
    run_experts(watch, 0, (watch.masked_middle, ((None, None), None, None, None)))


def test_quantizers_outside_of_experts_are_not_ours(native):
    recorder, _ = native
    packed, scales = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.uint8)
    Watch(lambda: recorder).fp4_quantize((packed, scales), torch.zeros(3, 64), torch.ones(1), 16, False, False)
    assert recorder.calls == {}


def test_a_layer_that_was_not_observed_leaves_invalid_rows(native):
    recorder, _ = native
    _, found = recorded(recorder, Watch(lambda: recorder))
    assert found.invalid_rows == 3


def test_scales_in_a_kernels_own_layout_alone_are_refused(native):
    recorder, pool = native
    pool.v_scale_buffer = None
    with pytest.raises(EngineError, match="own layout alone"):
        recorder.pool.stored([0], Kind.V, torch.tensor([1]))


def test_the_table_names_every_path_and_what_it_hides():
    lines = native_lines()
    assert {line.path for line in lines} >= {path.name for path in PATHS}
    middle = {line.path: line.state for line in lines if line.site == "experts_mid"}
    assert middle["flashinfer_trtllm"] == "fused away"
    assert middle["flashinfer_cutedsl, deepep"] == "expected, not run"
    assert middle["marlin"] == "not quantized"
    assert not [line for line in lines if line.state == "recorded"]
    assert all((line.state == "expected, not run") == line.codes for line in lines)


@pytest.mark.parametrize(
    ("configuration", "path"),
    [
        (("flashinfer_trtllm_routed", "none", "modelopt_fp4"), "flashinfer_trtllm"),
        (("flashinfer_cutedsl", "deepep", "modelopt_fp4"), "flashinfer_cutedsl, deepep"),
        (("flashinfer_cutedsl", "none", "nvfp4_online"), "flashinfer_cutedsl, nvfp4_online"),
        (("flashinfer_trtllm", "megamoe", "nvfp4_online"), "megamoe"),
        (("marlin", "none", None), "marlin"),
    ],
)
def test_a_configuration_has_its_path_and_only_that_is_shown(monkeypatch, configuration, path):
    from tracefp4.integrations.sglang import native as module

    assert running_path(*configuration) == path
    monkeypatch.setattr(module, "available", lambda: [hook.target for path in PATHS for hook in path.hooks])
    lines = observed(path)
    assert {line.path for line in lines} == {path, "--kv-cache-dtype nvfp4"}
    monkeypatch.setattr(module, "available", list)
    hidden = [line for line in observed("flashinfer_trtllm") if line.site == "experts_in"]
    assert [line.state for line in hidden] == ["not bound"]
    with pytest.raises(EngineError, match="does not show here"):
        check_plan(Plan.parse("r1-all/s8"), hidden)
    assert {line.state for line in observed("unknown")[:2]} == {"not bound"}


def test_observers_are_bound_to_what_can_be_imported(native):
    recorder, _ = native
    bound = []
    names = bind_observers(lambda target, hook, kind: bound.append((target, kind)), Watch(lambda: recorder))
    assert bound[0] == (EXPERTS, "around")
    assert [target for target, _ in bound[1:]] == names == available()


@pytest.mark.skipif(not installed("sglang.srt.utils"), reason="SGLang is not installed here")
@pytest.mark.engine
def test_the_tested_release_has_every_function_that_is_hooked(defined):
    targets = [EXPERTS, *(hook.target for path in PATHS for hook in path.hooks)]
    missing = [target for target in targets if target.startswith("sglang.") and defined(target) is None]
    assert not missing
    masked = defined("sglang.srt.layers.moe.flashinfer_cutedsl_moe.flashinfer_cutedsl_moe_masked")
    assert [a.arg for a in masked.args.args][:2] == ["hidden_states", "input_global_scale"]
    quantizer = defined("sglang.srt.layers.quantization.fp4_utils._flashinfer_fp4_quantize_impl")
    assert [a.arg for a in quantizer.args.args][:5] == [
        "input",
        "global_scale",
        "sf_vec_size",
        "sf_use_ue8m0",
        "is_sf_swizzled_layout",
    ]
    dispatch = defined("sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPLLDispatchOutput")
    fields = [n.target.id for n in dispatch.body if isinstance(n, ast.AnnAssign)]
    assert fields[:5] == ["hidden_states", "hidden_states_scale", "topk_ids", "topk_weights", "masked_m"]


def test_our_method_changes_no_architecture_and_others_are_left_alone():
    config = SimpleNamespace(quantization="tracefp4")
    assert same_architecture(lambda c: c.quantization, config) is None
    assert config.quantization == "tracefp4"
    with pytest.raises(ZeroDivisionError):
        same_architecture(lambda c: 1 / 0, config)
    assert config.quantization == "tracefp4"
    assert same_architecture(lambda c: c.quantization, SimpleNamespace(quantization="fp8")) == "fp8"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"tp_size": 2}, "tensor parallelism"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"quantization": "fp8"}, "the spec says"),
        ({"enable_hierarchical_cache": True}, "cache tier"),
    ],
)
def test_options_under_which_guidance_would_be_wrong_are_refused(options, words):
    with pytest.raises(EngineError, match=words):
        check_options(options)


def test_harmless_options_are_not_refused():
    check_options({"tp_size": 1, "schedule_policy": "lpm", "speculative_algorithm": None})


def test_seeds_are_given_to_batches_that_bring_them_all():
    def batch(*seeds):
        return SimpleNamespace(
            device="cpu", reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in seeds]
        )

    assert give_seeds(SimpleNamespace(sampling_seed=None), None, batch(3, 4)).sampling_seed.tolist() == [3, 4]
    assert give_seeds(SimpleNamespace(sampling_seed=None), None, batch(3, None)).sampling_seed is None


def test_the_hash_is_uniform_and_depends_on_all_of_its_arguments():
    seeds, positions = torch.arange(64).to(torch.uint64), torch.arange(64) * 3
    found = hash32(seeds, positions, torch.arange(2000))
    assert found.shape == (64, 2000)
    assert int(found.min()) >= 0
    assert int(found.max()) < 2**32
    share = found.double() / 2**32
    assert abs(float(share.mean()) - 0.5) < 0.01
    assert abs(float(share.std()) - 12**-0.5) < 0.01
    assert abs(float(torch.corrcoef(share)[0, 1:].abs().max())) < 0.1
    assert len(found.unique()) > 0.999 * found.numel()
    assert not torch.equal(found, hash32(seeds, positions + 1, torch.arange(2000)))
    assert not torch.equal(found, hash32(torch.arange(1, 65).to(torch.uint64), positions, torch.arange(2000)))
