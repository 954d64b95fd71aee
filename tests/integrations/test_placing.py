"""Packed experts where an engine's own kernels compute: SGLang takes them through its loader, vLLM refuses them."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from tracefp4.errors import SyncError
from tracefp4.formats import e2m1, e4m3
from tracefp4.formats.spec import get_spec
from tracefp4.integrations.engines.weights import Names, hollow
from tracefp4.integrations.sglang import refit
from tracefp4.integrations.sglang.placing import METHOD, modelopt_tensors
from tracefp4.integrations.sglang.stored import stored_experts
from tracefp4.models.packing import PackedState
from tracefp4.models.tiny import tiny_model
from tracefp4.models.weight_file import write_weights

SPEC = get_spec("nvfp4-w4a4", "nvfp4-modelopt")
HARNESS = str(Path(__file__).parents[1] / "engines" / "harness")
"""Stand-ins for what SGLang imports and a CPU does not have."""
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}
"""Whole tiles of scales: then SGLang keeps the tiled ones in the memory of those that it loads."""
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")


def packed_state(seed=0, spec=SPEC):
    model = tiny_model("qwen3_moe", seed=seed, **SIZES)
    names = Names(hollow(model))
    return names, PackedState(model, names.layout, spec.weights, dict(model.named_parameters()))


def test_an_experts_projection_is_what_a_modelopt_checkpoint_holds():
    names, state = packed_state()
    found = modelopt_tensors(names, state, METHOD)
    prefix = names.layout.experts[1]
    both = state[f"{prefix}.gate_up_proj"]
    for part, rows in (("gate_proj", slice(0, 128)), ("up_proj", slice(128, 256))):
        codes, scales, scale = (
            found[f"{prefix}.5.{part}.{kind}"] for kind in ("weight", "weight_scale", "weight_scale_2")
        )
        assert (codes.dtype, scales.dtype, scale.shape) == (torch.uint8, torch.float8_e4m3fn, (1,))
        # By the format's definition: value = code x block scale x scale, in float32.
        values = e2m1.decode(e2m1.unpack(codes)).unflatten(1, (-1, 16)) * scales.float().unsqueeze(2) * scale
        assert torch.equal(values.flatten(1), both.dequantize()[5, rows])
    assert len(found) == 3 * 3 * 8 * 2
    assert torch.equal(e4m3.decode(found[f"{prefix}.0.down_proj.weight_scale"].view(torch.uint8)), found[
        f"{prefix}.0.down_proj.weight_scale"].float())  # fmt: skip
    assert modelopt_tensors(names, {}, None) == {}


def test_what_sglangs_kernels_do_not_take_is_refused():
    names, state = packed_state()
    for method in ("nvfp4_online", "compressed-tensors", None):
        with pytest.raises(
            SyncError, match=f"SGLang's {method!r} takes no packed experts .* --quantization modelopt_fp4"
        ):
            modelopt_tensors(names, state, method)
    for numerics in ("nvfp4-te", "nvfp4-ct"):
        with pytest.raises(SyncError, match="deploy a spec of nvfp4-modelopt"):
            modelopt_tensors(*packed_state(spec=get_spec("nvfp4-w4a4", numerics)), METHOD)


@pytest.mark.parametrize("emulate", [True, False])
def test_the_loader_takes_packed_experts_to_whoever_multiplies_them(tmp_path, monkeypatch, emulate):
    names, state = packed_state()
    write_weights(tmp_path / "w.safetensors", state)
    given, placed = {}, []
    model = types.SimpleNamespace(named_parameters=lambda **_: [], load_weights=lambda found: given.update(found))
    ours = types.SimpleNamespace(
        names=names, spec=SPEC, recording=False, quantization=METHOD,
        settings=types.SimpleNamespace(emulate=emulate),
        experts=dict.fromkeys(names.layout.experts, types.SimpleNamespace(place=lambda *what: placed.append(what))),
    )  # fmt: skip
    monkeypatch.setattr(refit, "worker", lambda: ours)
    refit.load_file(model, [(json.dumps({"path": str(tmp_path / "w.safetensors"), "version": 1}), torch.zeros(1))])
    experts = {name for name in given if ".experts." in name}
    assert (len(placed), len(experts)) == ((4, 0) if emulate else (0, 144))
    assert len(given) - len(experts) == len(names.checkpoint(state))


@needs_sglang
@pytest.mark.engine
@pytest.mark.parametrize("up_first", [False, True])
def test_sglangs_loader_puts_them_where_the_checksum_finds_them(monkeypatch, up_first):
    monkeypatch.syspath_prepend(HARNESS)
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization import utils
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
    from sglang.srt.layers.utils.common import alias_or_bind_derived_param

    experts, hidden, inner = 8, SIZES["hidden_size"], SIZES["moe_intermediate_size"]

    def tile(scales):
        view = scales.view(torch.uint8).view(-1, 4, 32, scales.shape[1] // 4, 4)
        return view.permute(0, 3, 2, 1, 4).reshape(-1)

    if "flashinfer" not in sys.modules:
        monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(nvfp4_block_scale_interleave=tile))

    class ModelOptWithoutGPU(ModelOptNvFp4FusedMoEMethod):
        load_up_proj_weight_first = up_first

        def __init__(self):
            """Without a GPU to ask."""

    module = FusedMoE.__new__(FusedMoE)
    nn.Module.__init__(module)
    shapes = {"w13": (2 * inner, hidden), "w2": (hidden, inner)}
    for part, (rows, columns) in shapes.items():
        empty = {
            "weight": torch.zeros(experts, rows, columns // 2, dtype=torch.uint8),
            "weight_scale": torch.zeros(experts, rows, columns // 16).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.zeros((experts, 2) if part == "w13" else (experts,)),
        }
        for name, tensor in empty.items():
            module.register_parameter(f"{part}_{name}", nn.Parameter(tensor, requires_grad=False))
    vars(module).update(
        scheme=None, moe_tp_size=1, moe_tp_rank=0, layer_id=1, use_presharded_weights=False, use_triton_kernels=False,
        use_flashinfer_trtllm_moe=False, _has_fused_shared=False, quant_config=None, num_fused_shared_experts=0,
        moe_runner_config=types.SimpleNamespace(is_gated=True), quant_method=ModelOptWithoutGPU(),
    )  # fmt: skip
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", experts)
    for seed in (0, 1):  # The second time over what the first left behind.
        names, state = packed_state(seed)
        prefix = names.layout.experts[1]
        for name, tensor in modelopt_tensors(names, state, METHOD).items():
            if not name.startswith(prefix):
                continue
            # As SGLang's models do it.
            ours, theirs, expert, shard = next(line for line in mapping if f".{line[1]}" in name)
            target = name.replace(theirs, ours)
            parameter = dict(module.named_parameters())[target.rpartition("experts.")[2]]
            module._weight_loader_impl(parameter, tensor, target, shard, expert)
        for part in shapes:
            tiled = utils.swizzle_blockscale(getattr(module, f"{part}_weight_scale"))
            alias_or_bind_derived_param(module, f"{part}_weight_scale", f"{part}_blockscale_swizzled", tiled)
        for projection, kept in stored_experts(module).items():
            name = f"{prefix}.{projection}"
            back, sent = names.packed(1, projection, kept, SPEC), state[name]
            assert all(torch.equal(a, b) for a, b in zip(back.parts(), sent.parts(), strict=True))


# vLLM -----------------------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.engine
@pytest.mark.parametrize("emulated", [True, False])
def test_vllm_places_them_for_our_arithmetic_and_refuses_them_for_its_own(tmp_path, monkeypatch, emulated):
    from tracefp4.integrations.vllm import transfer

    names, state = packed_state()
    path = tmp_path / "w.safetensors"
    write_weights(path, state)
    placed, given = [], {}
    ours = types.SimpleNamespace(place=lambda *what: placed.append(what)) if emulated else None
    session = types.SimpleNamespace(
        names=names,
        experts=dict.fromkeys(names.layout.experts, ours),
        recorder=types.SimpleNamespace(spec=SPEC),
    )
    monkeypatch.setattr(transfer, "session", lambda: session)
    engine = transfer.FileTransferEngine.__new__(transfer.FileTransferEngine)

    def load_weights(found):
        given.update(found)
        return set(given)

    engine.model = types.SimpleNamespace(load_weights=load_weights)
    if not emulated:
        with pytest.raises(SyncError, match="vLLM's own kernels keep the experts of layer 0 .* `tracefp4 quantize"):
            engine.receive_weights(transfer.UpdateInfo(str(path), 3))
        assert not given
        return
    engine.receive_weights(transfer.UpdateInfo(str(path), 3))
    assert [projection for projection, _ in placed] == ["gate_up_proj", "down_proj"] * 2
    assert given.keys() == names.checkpoint(state).keys()
    assert engine._version == 3
