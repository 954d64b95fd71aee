"""Our side of SGLang, with stand-ins of its signatures; the real engine is in tests/engines."""

from __future__ import annotations

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
from tracefp4.integrations.sglang.engine import check_options
from tracefp4.integrations.sglang.native import PATHS, bind_observers, native_lines
from tracefp4.integrations.sglang.observe import NativePool, Watch, linear_scales, note_layer
from tracefp4.integrations.sglang.plugin import same_architecture
from tracefp4.integrations.sglang.seeds import give_seeds, hash32
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.quantizers.nearest import quantize_nearest

SPEC = get_spec("nvfp4-w4a4-kv4", "nvfp4-flashinfer-exact")


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
        Plan.parse("r4-all"),
        MemoryStore(),
        slots=32,
        step_tokens=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        pool=NativePool(lambda: pool),
    )
    return recorder, pool


def run_experts(layer, hook, *results):
    """Call a hook as SGLang's experts of ``layer`` would meet it."""
    module = SimpleNamespace(layer_id=layer)
    note_layer(lambda module, *_: hook(*results), module, None, None)


def observed(recorder, *calls):
    """Record one pass of three tokens and read it back."""
    slots, tokens = torch.tensor([4, 7, 9]), [1, 2, 3]
    recorder.begin(slots, torch.arange(3), torch.tensor(tokens))
    for layer in range(recorder.layout.num_layers):
        for hook, arguments in calls:
            run_experts(layer, hook, *arguments)
    recorder.keep(recorder.end())
    found = recorder.collect(slots, [*tokens, 8], "key")
    return decode(recorder.store.get(found.guidance)), found


@pytest.mark.parametrize("how", ["hidden_states", "fp4_quantize", "swizzled", "per_token"])
def test_codes_of_a_native_quantizer_are_recorded_as_they_are(native, how):
    recorder, pool = native
    x = torch.randn(3, recorder.layout.hidden).bfloat16()
    scale = torch.tensor([7.0]) if how != "per_token" else None
    q = quantize_nearest(x, SPEC.activations, None if scale is None else scale.expand(3, 1))
    packed, watch = e2m1.pack(q.codes), Watch(lambda: recorder)
    scales = q.scales.view(torch.float8_e4m3fn)
    if how == "hidden_states":
        call = watch.hidden_states, ((packed, scales), x, scale)
    elif how == "fp4_quantize":
        call = watch.fp4_quantize, ((packed, scales), x, scale, 16, False, False)
    elif how == "swizzled":
        call = watch.fp4_quantize, ((packed, swizzle(q.scales)), x, scale)
    else:
        call = watch.per_token, ((packed, scales, torch.reciprocal(q.global_scale.flatten())), x)
    record, found = observed(recorder, call)
    assert found.invalid_rows == 0
    for layer in range(recorder.layout.num_layers):
        outcome = record.sites[Site(layer, Kind.EXPERTS_IN)].outcome()
        assert torch.equal(outcome.low, q.codes)
        assert torch.equal(outcome.scales, q.scales)
        torch.testing.assert_close(outcome.global_scale, q.global_scale.expand(3, 1), rtol=1e-6, atol=0)
        for kind, codes in ((Kind.K, pool.k_buffer), (Kind.V, pool.v_buffer)):
            kept = record.sites[Site(layer, kind)].outcome()
            assert torch.equal(e2m1.pack(kept.low), codes[layer][[4, 7, 9]].flatten(0, 1))


def test_quantizers_outside_of_experts_are_not_ours(native):
    recorder, _ = native
    packed, scales = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.uint8)
    Watch(lambda: recorder).fp4_quantize((packed, scales), torch.zeros(3, 64), torch.ones(1), 16, False, False)
    assert recorder.calls == {}


def test_a_layer_that_was_not_observed_leaves_invalid_rows(native):
    recorder, _ = native
    _, found = observed(recorder)
    assert found.invalid_rows == 3


def test_scales_in_a_kernels_own_layout_alone_are_refused(native):
    recorder, pool = native
    pool.v_scale_buffer = None
    with pytest.raises(EngineError, match="own layout alone"):
        recorder.pool.stored([0], Kind.V, torch.tensor([1]))


def swizzle(scales):
    """The layout of 128 x 4 tiles, element by element as it is defined."""
    rows, blocks = scales.shape
    wide = -(-blocks // 4)
    out = torch.zeros(-(-rows // 128) * 128 * wide * 4, dtype=torch.uint8)
    for r in range(rows):
        for b in range(blocks):
            tile = (r // 128) * wide + b // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + b % 4] = scales[r, b]
    return out


@pytest.mark.parametrize(("rows", "blocks"), [(1, 4), (130, 6), (256, 8), (33, 1)])
def test_swizzled_scales_become_rows(rows, blocks):
    scales = torch.randint(0, 255, (rows, blocks), dtype=torch.uint8)
    assert torch.equal(linear_scales(swizzle(scales), rows, blocks), scales)


def test_the_table_names_every_path_and_what_it_hides():
    lines = native_lines()
    assert {line.path for line in lines} >= {path.name for path in PATHS}
    assert {line.state for line in lines if line.site == "experts_mid"} == {"fused away", "not bound", "not quantized"}
    assert not [line for line in lines if line.state == "recorded"]
    assert all((line.state == "expected, not run") == line.codes for line in lines)


def test_observers_are_bound_to_what_can_be_imported(native):
    recorder, _ = native
    bound = []
    names = bind_observers(lambda target, hook, kind: bound.append((target, kind)), Watch(lambda: recorder))
    assert bound[0] == ("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl", "around")
    assert [target for target, _ in bound[1:]] == names


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
