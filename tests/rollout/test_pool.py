"""Pages and what is stored in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized, quantize
from tracefp4.formats.spec import get_spec
from tracefp4.models.footprint import footprint
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.plane import dequantize_packed
from tracefp4.rollout.pool import KVPool, PageAllocator


def test_pages_are_counted():
    pages = PageAllocator(4, 8)
    first = pages.allocate(3)
    pages.share(first[:1])
    assert pages.free == 1 and len(set(first)) == 3 and pages.padding_page == 4
    pages.release(first)
    assert pages.free == 3
    pages.release(first[:1])
    assert pages.free == 4
    with pytest.raises(EngineError, match="released twice"):
        pages.release(first[:1])
    with pytest.raises(EngineError, match="is free"):
        pages.share(first[:1])
    with pytest.raises(EngineError, match="4 free pages, 5"):
        pages.allocate(5)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 7)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_every_page_is_either_free_or_owned(actions):
    pages, owners = PageAllocator(8, 2), []
    for action, value in actions:
        if action == "take" and value <= pages.free:
            owners.append(pages.allocate(value))
        elif action == "share" and owners:
            pages.share(owners[value % len(owners)])
            owners.append(list(owners[value % len(owners)]))
        elif action == "drop" and owners:
            pages.release(owners.pop(value % len(owners)))
        owned = {page for pages_of_one in owners for page in pages_of_one}
        assert pages.free == 8 - len(owned)
    for rest in owners:
        pages.release(rest)
    assert pages.free == 8


def test_slots_follow_pages():
    assert PageAllocator(9, 4).slots([7, 2], 3, 6) == [31, 8, 9]


@pytest.mark.parametrize("spec", ["nvfp4-kv4", "mxfp4-w4a4-kv4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_values_equal_the_formats_own(device, spec, dtype):
    numerics = get_spec(spec).kv
    scales = torch.arange(0, 127, dtype=torch.uint8, device=device).repeat_interleave(8)
    packed = torch.arange(256, dtype=torch.uint8, device=device).repeat(127 * numerics.block // 64)
    packed = packed.view(-1, numerics.block // 2)[: len(scales)]
    scales = scales[: len(packed), None]
    found = dequantize_packed(packed, scales, numerics, dtype)
    expected = Quantized(e2m1.unpack(packed), scales, None, numerics).dequantize(dtype)
    assert found.dtype is dtype and torch.equal(found, expected)


@pytest.mark.parametrize("spec", ["nvfp4-kv4", "bf16"])
def test_the_pool_returns_what_it_stored(spec):
    layout = describe(tiny_model("qwen3_moe"))
    pool = KVPool(layout, get_spec(spec), 12, torch.bfloat16, torch.device("cpu"))
    k, v = torch.randn(2, 5, layout.kv_heads, layout.head_dim).bfloat16()
    slots = torch.tensor([3, 9, 0, 11, 4])
    pool.write(1, slots, {Kind.V: v, Kind.K: k})
    for kind, x in ((Kind.K, k), (Kind.V, v)):
        expected = quantize(x, pool.numerics).dequantize(torch.bfloat16) if pool.numerics else x
        assert torch.equal(pool.read(1, slots)[kind], expected)
        assert not pool.read(0, slots)[kind].any()
    pool.copy(slots[:2], torch.tensor([1, 2]))
    assert torch.equal(pool.read(1, torch.tensor([[1], [2]]))[Kind.V].squeeze(1), expected[:2])
    if pool.numerics is None:
        with pytest.raises(EngineError, match="no codes"):
            pool.stored([1], Kind.V, slots)
    else:
        # 4 bits a value and a byte for 16 of them, K and V, two layers
        assert pool.nbytes == 12 * 2 * 2 * layout.kv_heads * (layout.head_dim // 2 + layout.head_dim // 16)
        codes, scales = pool.stored([1], Kind.V, slots)
        q = quantize(v, pool.numerics)
        assert torch.equal(e2m1.unpack(codes), q.codes[None]) and torch.equal(scales, q.scales[None])


@given(
    layers=st.integers(1, 3),
    slots=st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True),
    seed=st.integers(0, 9),
    spec=st.sampled_from(["nvfp4-kv4", "mxfp4-w4a4-kv4"]),
)
@settings(max_examples=20, deadline=None)
def test_layers_left_in_bfloat16_store_values_and_the_others_codes(layers, slots, seed, spec):
    layout = describe(tiny_model("qwen3_moe", num_hidden_layers=4))
    deployed = get_spec(f"{spec}/b{layers}")
    pool = KVPool(layout, deployed, 12, torch.bfloat16, torch.device("cpu"))
    whole = KVPool(layout, get_spec(spec), 12, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(seed)
    places, written = torch.tensor(slots), {}
    for layer in layout.kv_layers:
        k, v = torch.randn(2, len(slots), layout.kv_heads, layout.head_dim).bfloat16()
        pool.write(layer, places, {Kind.K: k, Kind.V: v})
        whole.write(layer, places, {Kind.K: k, Kind.V: v})
        written[layer] = {Kind.K: k, Kind.V: v}
    for layer, parts in written.items():
        for kind, x in parts.items():
            expected = x if layer < layers else whole.read(layer, places)[kind]
            assert torch.equal(pool.read(layer, places)[kind], expected)
    rest = list(range(layers, 4))
    for one, other in zip(pool.stored(rest, Kind.V, places), whole.stored(rest, Kind.V, places), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(EngineError, match=f"layer {layers - 1} stores k in torch.bfloat16"):
        pool.stored([layers - 1, *rest], Kind.K, places)
    copied = torch.arange(12)
    kept = pool.read(0, places)[Kind.V]
    target = torch.tensor([slot for slot in copied.tolist() if slot not in slots][: len(slots)], dtype=torch.int64)
    pool.copy(places[: len(target)], target)
    assert torch.equal(pool.read(0, target)[Kind.V], kept[: len(target)])
    assert pool.token_bytes == footprint(layout, deployed).token
    assert whole.token_bytes == footprint(layout, get_spec(spec)).token


def test_numerics_without_a_constant_scale_are_refused():
    spec = get_spec("nvfp4-kv4")
    with pytest.raises(EngineError, match="scope 'token'"):
        KVPool(
            describe(tiny_model("mixtral")),
            replace(spec, kv=replace(spec.kv, scope="token")),
            4,
            torch.bfloat16,
            torch.device("cpu"),
        )
