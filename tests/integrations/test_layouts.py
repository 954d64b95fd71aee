"""Layouts of FP4 kernels, undone: by their definition, and against the engines' own functions where they import."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from tracefp4.errors import SyncError
from tracefp4.formats.spec import get_spec
from tracefp4.integrations.engines.layouts import PLAIN, Rows, from_matrix_view, linear_scales, tile_offsets, tiled_rows
from tracefp4.integrations.engines.stored import StoredWeight
from tracefp4.integrations.engines.weights import Names, Served
from tracefp4.integrations.sglang import refit
from tracefp4.integrations.sglang.stored import stored_experts as sglang_experts
from tracefp4.integrations.vllm.stored import KEPT, keep_globals
from tracefp4.integrations.vllm.stored import stored_experts as vllm_experts
from tracefp4.models.packing import model_digest, pack_weight
from tracefp4.models.tiny import tiny_model

MODELOPT = get_spec("nvfp4-w4a4", "nvfp4-modelopt").weights
HARNESS = str(Path(__file__).parents[1] / "engines" / "harness")
"""Stand-ins for what SGLang imports and a CPU does not have."""
EXPERTS, HIDDEN, INNER = 3, 256, 192
"""Neither the hidden size nor the intermediate one is whole tiles, or chunks, of every kernel."""


def has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_sglang = pytest.mark.skipif(not has("sglang.srt.utils"), reason="SGLang is not installed here")
needs_vllm = pytest.mark.skipif(not has("vllm._version"), reason="vLLM is not installed here")


# -- By definition


def tile(scales):
    """The layout of 128 x 4 tiles, element by element as it is defined."""
    rows, blocks = scales.shape
    wide = -(-blocks // 4)
    out = torch.zeros(-(-rows // 128) * 128 * wide * 4, dtype=torch.uint8)
    for r in range(rows):
        for b in range(blocks):
            place = (r // 128) * wide + b // 4
            out[place * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + b % 4] = scales[r, b]
    return out


def tile_all(scales):
    """Of stacked weights: ``(E, padded rows, padded blocks)``, as engines hold it."""
    wide = -(-scales.shape[2] // 4) * 4
    return torch.stack([tile(part).reshape(-1, wide) for part in scales])


def shuffle(x):
    """TRT-LLM: in each block of 32 rows, row r moves to r % 4 * 8 + r // 4."""
    r = torch.arange(x.shape[1])
    out = torch.empty_like(x)
    out[:, r // 32 * 32 + r % 4 * 8 + r % 32 // 4] = x
    return out


def take_turns(x, chunk):
    """Chunks of rows from the first and the second half in turn."""
    a, b = x.chunk(2, dim=1)
    return torch.cat([p for pair in zip(a.split(chunk, 1), b.split(chunk, 1), strict=True) for p in pair], dim=1)


def swap(x):
    a, b = x.chunk(2, dim=1)
    return torch.cat([b, a], dim=1)


def pad_halves(x, rows):
    a, b = x.chunk(2, dim=1)
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[1])) for part in (a, b)], dim=1)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 4), (130, 6), (256, 8), (33, 1)])
def test_scales_in_tiles_become_rows(rows, blocks):
    scales = torch.randint(0, 255, (rows, blocks), dtype=torch.uint8)
    tiled = tile(scales)
    assert torch.equal(linear_scales(tiled, rows, blocks), scales)
    some = torch.randint(0, rows, (7,))
    assert torch.equal(tiled_rows(tiled.reshape(-1, 4), some, blocks), scales[some])


def test_places_in_a_tile_are_those_of_the_hardware():
    # Worked out by hand: row 161 is row 33 of the second row of tiles, block 5 the second of its second tile.
    assert tile_offsets(torch.tensor([0, 1, 32, 127, 161]), 6).tolist() == [
        [0, 1, 2, 3, 512, 513],
        [16, 17, 18, 19, 528, 529],
        [4, 5, 6, 7, 516, 517],
        [508, 509, 510, 511, 1020, 1021],
        [1044, 1045, 1046, 1047, 1556, 1557],
    ]


def test_scales_under_six_axes_are_the_same_bytes():
    scales = torch.randint(0, 255, (EXPERTS, 256, 8), dtype=torch.uint8)
    tiled = tile_all(scales)
    view = tiled.view(EXPERTS, 2, 2, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    assert view.shape == (32, 4, 2, 4, 2, EXPERTS)
    assert torch.equal(from_matrix_view(view).reshape(-1), tiled.reshape(-1))


@pytest.mark.parametrize(
    ("rows", "arrange"),
    [
        (Rows(), lambda x: x),
        (Rows(up_first=True), swap),
        (Rows(up_first=True, chunk=64), lambda x: take_turns(pad_halves(swap(x), 256), 64)),
        (Rows(up_first=True, chunk=1, shuffled=True), lambda x: shuffle(take_turns(pad_halves(swap(x), 256), 1))),
        (Rows(chunk=16), lambda x: take_turns(x, 16)),
        (Rows(shuffled=True), lambda x: shuffle(torch.nn.functional.pad(x, (0, 0, 0, 128)))),
    ],
)
def test_rows_come_back_in_the_checkpoints_order(rows, arrange):
    x = torch.randint(1, 255, (EXPERTS, 2 * INNER, 5), dtype=torch.uint8)
    stored = arrange(x)
    assert rows == PLAIN or not torch.equal(stored[:, : 2 * INNER], x)
    assert torch.equal(rows.undo(stored, 2 * INNER), x)


def test_rows_that_cannot_have_been_arranged_so_are_refused():
    with pytest.raises(SyncError, match="another release's layout"):
        Rows(up_first=True, chunk=64).undo(torch.zeros(1, 2 * 96, 4), 2 * 96)


# -- Whole weights


@pytest.fixture
def weights():
    """Both projections of a layer, as the trainer packs them."""
    generator = torch.Generator().manual_seed(4)
    made = {"gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
    return {n: pack_weight(torch.randn(s, generator=generator).bfloat16(), MODELOPT) for n, s in made.items()}


def shape_of(weight):
    return weight.codes.shape[0], weight.codes.shape[1], weight.codes.shape[2] * 2


def check(found, weights):
    for name, weight in weights.items():
        back = found[name].packed(name, shape_of(weight), MODELOPT)
        for mine, theirs in zip(weight.parts(), back.parts(), strict=True):
            assert torch.equal(mine, theirs), name


def kept(weight, **changes):
    made = {"codes": weight.codes, "scales": weight.scales, "global_scale": weight.global_scale.flatten()}
    return StoredWeight(**{**made, "form": "decode", **changes})


def test_what_cannot_be_compared_is_refused_by_name(weights):
    down = weights["down_proj"]
    plain, shape = kept(down), shape_of(down)
    assert torch.equal(plain.packed("w", shape, MODELOPT).codes, down.codes)
    with pytest.raises(SyncError, match="nvfp4-modelopt"):
        plain.packed("w", shape, get_spec("nvfp4-w4a4", "nvfp4-ct").weights)
    two = torch.stack([down.global_scale.flatten(), down.global_scale.flatten() * 2], dim=1)
    with pytest.raises(SyncError, match="they must share one"):
        kept(down, global_scale=two).packed("w", shape, MODELOPT)
    padded = torch.nn.functional.pad(down.codes, (0, 0, 0, 128), value=1)
    with pytest.raises(SyncError, match="padding is not zero"):
        kept(down, codes=padded, scales=torch.nn.functional.pad(down.scales, (0, 0, 0, 128))).packed(
            "w", shape, MODELOPT
        )
    with pytest.raises(SyncError, match="keeps codes"):
        kept(down, codes=down.codes[:2]).packed("w", shape, MODELOPT)


def as_loaded(weights):
    """Codes, E4M3 scales and global scales under the engines' names."""
    up, down = weights["gate_up_proj"], weights["down_proj"]
    return {
        "w13": up.codes.clone(),
        "w13_scale": up.scales.clone().view(torch.float8_e4m3fn),
        "w13_scale_2": up.global_scale.flatten().clone(),
        "w2": down.codes.clone(),
        "w2_scale": down.scales.clone().view(torch.float8_e4m3fn),
        "w2_scale_2": down.global_scale.flatten().clone(),
    }


@pytest.fixture
def flashinfer(monkeypatch):
    """FlashInfer's layout functions as it defines them, where it is not installed: both engines call them by name."""
    if has("flashinfer"):
        return
    # They ask whether it is there when they are imported, and then it is not.
    if has("vllm._version"):
        importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.nvfp4")
    if has("sglang.srt.utils"):
        monkeypatch.syspath_prepend(HARNESS)
        importlib.import_module("sglang.srt.layers.quantization.utils")

    def indices(rows, gated):
        order = torch.arange(rows)
        if gated:
            order = order.view(2, -1).t().reshape(-1)
        return shuffle(order.view(1, -1, 1)).flatten()

    def gate_up(cache, weight, epilogue_tile_m, num_elts_per_sf=None, is_gated_act_gemm=True):
        return indices(weight.shape[0], is_gated_act_gemm)

    def down(cache, weight, epilogue_tile_m, num_elts_per_sf=None, is_gated_act_gemm=None):
        return indices(weight.shape[0], False)

    def convert(sf, m, k, num_groups=1, sf_vec_size=16):
        view = sf.view(num_groups, -(-m // 128), -(-k // sf_vec_size // 4), 32, 4, 4)
        return view.permute(3, 4, 1, 5, 2, 0)

    made = {
        "flashinfer": {"nvfp4_block_scale_interleave": tile},
        "flashinfer.fused_moe": {},
        "flashinfer.fused_moe.core": {
            "_maybe_get_cached_w3_w1_permute_indices": gate_up,
            "get_w2_permute_indices_with_cache": down,
        },
        "flashinfer.cute_dsl": {},
        "flashinfer.cute_dsl.utils": {"convert_sf_to_mma_layout": convert},
    }
    for name, attributes in made.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


@needs_vllm
@pytest.mark.engine
@pytest.mark.parametrize(
    "backend",
    [
        "EMULATION",
        "VLLM_CUTLASS",
        "FLASHINFER_CUTLASS",
        "FLASHINFER_CUTEDSL_BATCHED",
        "FLASHINFER_CUTEDSL",
        "FLASHINFER_TRTLLM",
    ],
)
def test_vllms_own_layouts_are_undone(weights, flashinfer, monkeypatch, backend):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend, convert_to_nvfp4_moe_kernel_format

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # Its swizzle ends on the current device.
    parallel = types.SimpleNamespace(enable_eplb=False)
    config = types.SimpleNamespace(
        moe_parallel_config=parallel, hidden_dim=HIDDEN, hidden_dim_unpadded=None, intermediate_size_per_partition=INNER
    )
    layer = types.SimpleNamespace(activation=MoEActivation.SILU, moe_config=config, layer_name="model.layers.0.mlp")
    scales = {"a13_scale": torch.full((EXPERTS, 2), 0.5), "a2_scale": torch.full((EXPERTS,), 0.25)}
    member = NvFp4MoeBackend[backend]
    out = keep_globals(
        convert_to_nvfp4_moe_kernel_format,
        nvfp4_backend=member,
        layer=layer,
        is_act_and_mul=True,
        **as_loaded(weights),
        **scales,
    )
    layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale = out[0], out[1], out[4], out[5]
    out[2].mul_(3.0)  # As the kernel folds the scale of the inputs in.
    method = types.SimpleNamespace(nvfp4_backend=member)
    check(vllm_experts(layer, method), weights)
    if backend != "EMULATION":
        assert layer.w13_weight_scale.shape != weights["gate_up_proj"].scales.shape or not torch.equal(
            layer.w13_weight_scale.view(torch.uint8), weights["gate_up_proj"].scales
        )


def test_vllms_other_layouts_are_refused():
    layer = types.SimpleNamespace(layer_name="model.layers.0.mlp")
    assert vllm_experts(layer, types.SimpleNamespace()) == {}
    with pytest.raises(SyncError, match="layout of marlin"):
        vllm_experts(layer, types.SimpleNamespace(nvfp4_backend=types.SimpleNamespace(name="MARLIN")))
    with pytest.raises(SyncError, match="not noted"):
        vllm_experts(layer, types.SimpleNamespace(nvfp4_backend=types.SimpleNamespace(name="VLLM_CUTLASS")))


def test_global_scales_are_noted_before_a_kernel_takes_them():
    def convert(nvfp4_backend, layer, w13_scale_2, w2_scale_2):
        w13_scale_2.mul_(2.0)
        return w13_scale_2

    layer = types.SimpleNamespace()
    assert keep_globals(convert, None, layer, torch.ones(2), w2_scale_2=torch.ones(2)).tolist() == [2.0, 2.0]
    assert getattr(layer, KEPT)["w13"].tolist() == [1.0, 1.0]


# -- SGLang


def sglang_module(weights, **changes):
    loaded = as_loaded(weights)
    made = {f"{part}_weight": loaded[part] for part in ("w13", "w2")}
    made |= {f"{part}_weight_scale": loaded[f"{part}_scale"] for part in ("w13", "w2")}
    made["w13_weight_scale_2"] = loaded["w13_scale_2"].unsqueeze(1).repeat(1, 2)
    made["w2_weight_scale_2"] = loaded["w2_scale_2"]
    return types.SimpleNamespace(**{"layer_id": 3, "quant_method": types.SimpleNamespace(), **made, **changes})


@needs_sglang
@pytest.mark.engine
@pytest.mark.parametrize("backend", ["cutlass", "cutedsl", "deepep", "trtllm", "compressed-tensors"])
def test_sglangs_own_layouts_are_undone(weights, flashinfer, backend):
    from sglang.srt.layers.quantization import utils

    module = sglang_module(weights)
    up_first = backend != "deepep"
    if up_first:  # Its loader puts up first; the global scales stay [gate, up].
        module.w13_weight, module.w13_weight_scale = swap(module.w13_weight), swap(module.w13_weight_scale)
    module.quant_method = types.SimpleNamespace(load_up_proj_weight_first=up_first)
    if backend == "trtllm":
        module.quant_method.use_flashinfer_trtllm_weight_layout = True
        made = utils.prepare_static_weights_for_trtllm_fp4_moe(
            module.w13_weight, module.w2_weight, module.w13_weight_scale, module.w2_weight_scale, HIDDEN, INNER, EXPERTS
        )
        module.w13_weight, module.w13_weight_scale, module.w2_weight, module.w2_weight_scale = made
        check(sglang_experts(module), weights)
        return
    if backend == "cutedsl":
        interleave = pytest.importorskip("sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl").interleave_w13_halves
        module.w13_weight = interleave(module.w13_weight, group_size=64, dim=1)
        module.w13_weight_scale = interleave(module.w13_weight_scale, group_size=64, dim=1)
    tiled = {part: utils.swizzle_blockscale(getattr(module, f"{part}_weight_scale")) for part in ("w13", "w2")}
    for part, scales in tiled.items():
        if backend == "compressed-tensors":
            setattr(module, f"{part}_weight_scale", scales)
            setattr(module, f"{part}_weight_global_scale", 1 / getattr(module, f"{part}_weight_scale_2"))
            continue
        setattr(module, f"{part}_blockscale_swizzled", scales)
        if backend == "cutedsl":
            rows, blocks = scales.shape[1] // 128, scales.shape[2] // 4
            view = scales.view(torch.uint8).reshape(EXPERTS, rows, blocks, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
            setattr(module, f"{part}_blockscale_mma", view)
    found = sglang_experts(module)
    if backend == "compressed-tensors":
        numerics = get_spec("nvfp4-w4a4", "nvfp4-ct").weights
        for name, weight in weights.items():
            back = found[name].packed(name, shape_of(weight), numerics)
            assert torch.equal(back.codes, weight.codes)
            assert torch.equal(back.scales, weight.scales)
            assert torch.equal(back.global_scale, 1 / weight.global_scale)
    else:
        check(found, weights)


def test_sglangs_other_layouts_are_refused_and_bfloat16_is_not_ours(weights):
    assert sglang_experts(types.SimpleNamespace(w13_weight=torch.zeros(1))) == {}
    with pytest.raises(SyncError, match="layer 3"):
        sglang_experts(sglang_module(weights, _mega_moe_weights_built=True))
    with pytest.raises(SyncError, match="not read back"):
        sglang_experts(sglang_module(weights, w13_weight=torch.zeros(1, dtype=torch.int32)))


# -- The checksum of a whole model


def served(model):
    """Checkpoint parameters of a model, and its experts packed as an engine loads them, by layer and projection."""
    names = Names(model)
    state = {name: p.detach() for name, p in model.named_parameters()}
    plain = {names.plain(name): tensor for name, tensor in state.items() if name not in names.experts}
    return names, plain, {key: pack_weight(state[name], MODELOPT) for name, key in names.experts.items()}


def test_a_model_whose_experts_sglang_keeps_has_the_trainers_checksum(monkeypatch):
    model = tiny_model("qwen3_moe")
    names, plain, packed = served(model)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for layer in names.layout.moe_layers:
                part = torch.nn.Module()
                found = {projection: packed[layer, projection] for projection in ("gate_up_proj", "down_proj")}
                vars(part).update(vars(sglang_module(found, layer_id=layer)))
                for prefix in ("w13", "w2"):  # CuteDSL behind DeepEP: the checkpoint's rows, scales in tiles.
                    scales = getattr(part, f"{prefix}_weight_scale").view(torch.uint8)
                    setattr(part, f"{prefix}_blockscale_swizzled", tile_all(scales))
                self.add_module(f"experts{layer}", part)

    def found(spec):
        ours = types.SimpleNamespace(names=names, spec=spec)
        monkeypatch.setattr(refit, "worker", lambda: ours)
        read, stacked = {}, {}
        refit._read(Module(), read, stacked)
        assert not stacked
        return Served(names, plain, read, stacked).digest()

    assert found(get_spec("nvfp4-w4a4", "nvfp4-modelopt")) == model_digest(model, names.layout, MODELOPT)
    packed[1, "down_proj"].codes[0, 0, 0] ^= 1
    assert found(get_spec("nvfp4-w4a4", "nvfp4-modelopt")) != model_digest(model, names.layout, MODELOPT)
    with pytest.raises(SyncError, match="leaves weights as they are"):
        found(get_spec("bf16"))


@needs_vllm
@pytest.mark.engine
def test_a_model_whose_experts_vllm_keeps_has_the_trainers_checksum(monkeypatch):
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from tracefp4.integrations.vllm import worker as module

    model = tiny_model("qwen3_moe")
    names, plain, packed = served(model)
    root = torch.nn.Module()
    for name, tensor in plain.items():
        *above, last = name.split(".")
        place = root
        for part in above:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    for layer in names.layout.moe_layers:
        part = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(part)
        loaded = as_loaded({p: packed[layer, p] for p in ("gate_up_proj", "down_proj")})
        part.layer_name = f"model.layers.{layer}.mlp.experts"
        part.quant_method = types.SimpleNamespace(nvfp4_backend=types.SimpleNamespace(name="FLASHINFER_CUTLASS"))
        part.w13_weight, part.w2_weight = swap(loaded["w13"]), loaded["w2"]
        part.w13_weight_scale = tile_all(swap(loaded["w13_scale"].view(torch.uint8)))
        part.w2_weight_scale = tile_all(loaded["w2_scale"].view(torch.uint8))
        setattr(part, KEPT, {"w13": loaded["w13_scale_2"], "w2": loaded["w2_scale_2"]})
        root.add_module(f"experts{layer}", part)
    spec = get_spec("nvfp4-w4a4", "nvfp4-modelopt")
    session = types.SimpleNamespace(names=names, recorder=types.SimpleNamespace(spec=spec), packed=dict)
    monkeypatch.setattr(module, "session", lambda: session)
    worker = module.TraceWorker()
    worker.model_runner = types.SimpleNamespace(get_model=lambda: root)
    worker.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=torch.bfloat16))
    assert worker.tracefp4_digest() == model_digest(model, names.layout, MODELOPT)
    root.experts0.w2_weight[0, 0, 0] ^= 1
    assert worker.tracefp4_digest() != model_digest(model, names.layout, MODELOPT)
