"""K and V inside vLLM: our FP4 pages and their attention backend, vLLM's own NVFP4 pages, and rows that carry both."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.errors import EngineError, GuidanceCorrupt
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import quantize
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.layouts import four_token_places
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.settings import VARIABLE, EngineSettings, dump_spec
from tracefp4.integrations.engines.sites import CACHE, check_plan
from tracefp4.integrations.vllm import native
from tracefp4.integrations.vllm.arguments import engine_arguments, packs_pages, read_arguments
from tracefp4.integrations.vllm.attach import find_cache
from tracefp4.integrations.vllm.capturer import TraceCapturer
from tracefp4.integrations.vllm.native import HOOKS, cache_type, native_lines, observed, site_table
from tracefp4.integrations.vllm.own_pages import check_own_pages, read_own_pages
from tracefp4.integrations.vllm.pages import CachePages, plane_of, row_bytes, row_format
from tracefp4.integrations.vllm.reader import FrameReader
from tracefp4.kernels.runtime import interpreted
from tracefp4.models.attention import dense_attention
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model

CPU = torch.device("cpu")
SPEC = get_spec("nvfp4-w4a4-kv4")
LAYOUT = describe(tiny_model("qwen3_moe"))


def has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


needs_vllm = pytest.mark.skipif(not has("vllm._version"), reason="vLLM is not installed here")
ARRANGEMENTS = ["plain", pytest.param("kernels", marks=pytest.mark.skipif(not has("triton"), reason="no Triton"))]


@pytest.fixture(params=ARRANGEMENTS)
def arranged(request):
    """Plain pages, or those of kernels, which Triton interprets."""
    if request.param == "plain":
        yield request.param
        return
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    with interpreted():
        yield request.param


# -- vLLM's own pages, filled by an independent statement of what its store kernels do


def store(cache, heads, width, slots, q, side, moved):
    """Byte by byte, by the page's definition; ``moved``: V for TRT-LLM."""
    pages, _, tokens, whole = cache.shape
    by_head = cache.stride(1) == tokens * whole
    flat = [cache.as_strided((heads * 2 * tokens * whole,), (1,), p * cache.stride(0)) for p in range(pages)]
    packed, quarter = e2m1.pack(q.codes), width // 64
    for row, slot in enumerate(slots.tolist()):
        page, t = flat[slot // tokens], slot % tokens
        start = side * heads * tokens * whole
        for h in range(heads):
            line = (h * tokens + t) if by_head else (t * heads + h)
            for i in range(width // 2):
                page[start + line * (width // 2) + i] = packed[row, h, i]
            for b in range(width // 16):
                tt, bb = (t // 4 * 4 + b // quarter, b % quarter * 4 + t % 4) if moved else (t, b)
                line = (h * tokens + tt) if by_head else (tt * heads + h)
                page[start + heads * tokens * (width // 2) + line * (width // 16) + bb] = q.scales[row, h, b]


def own_layer(pages, heads, width, tokens, *, order="HND", fa2=False, dtype="nvfp4"):
    """An attention layer as far as it is read, with pages of noise."""
    whole = width // 2 + width // 16
    noise = torch.randint(0, 255, (pages * 2 * heads * tokens * whole,), dtype=torch.uint8)
    shape = (pages, 2 * heads, tokens, whole)
    cache = noise.view(shape) if order == "HND" else noise.view(pages, tokens, 2 * heads, whole).transpose(1, 2)
    impl = types.SimpleNamespace(num_kv_heads=heads, head_size=width, nvfp4_fa2=fa2, is_kvcache_nvfp4=True)
    scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    return types.SimpleNamespace(kv_cache=cache, impl=impl, kv_cache_dtype=dtype, **scales)


def rounded(count, heads, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, heads, width, generator=generator).bfloat16()
    return {Kind.K: quantize(k, SPEC.kv), Kind.V: quantize(v, SPEC.kv)}


def test_scales_of_four_tokens_are_where_the_store_kernel_puts_them():
    # By hand: quarters of 4 scales, so token 5, scale 7 is quarter 1, third in it, second token of its four.
    row, column = four_token_places(torch.tensor([5]), 16)
    assert (int(row[0, 7]), int(column[0, 7])) == (5, 13)
    row, column = four_token_places(torch.arange(16), 8)
    assert len(set((row * 8 + column).flatten().tolist())) == 128
    with pytest.raises(EngineError, match="multiple of 4"):
        four_token_places(torch.arange(4), 6)


@pytest.mark.parametrize(("order", "fa2"), [("HND", False), ("HND", True), ("NHD", True)])
def test_codes_and_scales_of_vllms_own_pages_are_read_byte_for_byte(order, fa2):
    layer, slots = own_layer(3, 2, 128, 16, order=order, fa2=fa2), torch.tensor([37, 0, 5, 19, 47, 6, 18])
    found = rounded(7, 2, 128)
    for side, (kind, q) in enumerate(found.items()):
        store(layer.kv_cache, 2, 128, slots, q, side, moved=kind == Kind.V and not fa2)
    for kind, q in found.items():
        codes, scales = read_own_pages(layer, kind, slots)
        assert torch.equal(codes, e2m1.pack(q.codes)) and torch.equal(scales, q.scales)
    if not fa2:
        # The same bytes read as FA2 lays them out are other scales.
        layer.impl.nvfp4_fa2 = True
        assert not torch.equal(read_own_pages(layer, Kind.V, slots)[1], found[Kind.V].scales)


def test_pages_of_another_release_are_refused():
    layer = own_layer(2, 2, 64, 16)
    layer.kv_cache = layer.kv_cache[:, :, :, :-1]
    with pytest.raises(EngineError, match="another release's layout"):
        read_own_pages(layer, Kind.K, torch.tensor([0]))
    layer = own_layer(2, 2, 64, 16)
    layer.kv_cache = layer.kv_cache[:, :, ::2]
    with pytest.raises(EngineError, match="strides"):
        read_own_pages(layer, Kind.K, torch.tensor([0]))


def test_pages_that_a_plan_cannot_be_read_from_are_refused_before_anything_runs():
    layers = {0: own_layer(2, 2, 64, 16), 1: own_layer(2, 2, 64, 16, dtype="nvfp4_4over6")}
    check_own_pages(layers, [0], SPEC.kv, 2)
    with pytest.raises(EngineError, match="layer 1 has a cache of type 'nvfp4_4over6'"):
        check_own_pages(layers, [0, 1], SPEC.kv, 2)
    with pytest.raises(EngineError, match="layer 2 has no cache"):
        check_own_pages(layers, [2], SPEC.kv, 2)
    with pytest.raises(EngineError, match="numerics are 'sglang-kv-mx"):
        check_own_pages(layers, [0], get_spec("mxfp4-w4a4-kv4", kv="sglang-kv-mx").kv, 2)
    layers[0]._v_scale_float = 0.5
    with pytest.raises(EngineError, match=r"v_scale = 0\.5"):
        check_own_pages(layers, [0], SPEC.kv, 2)
    layers[0]._v_scale_float = 1.0
    with pytest.raises(EngineError, match="2 of 4 KV heads on this rank"):
        check_own_pages(layers, [0], SPEC.kv, 4)
    check_own_pages({0: layers[1]}, [], SPEC.kv, 2)


# -- Frames


TOKENS = [4, 8, 15, 16, 23, 42, 7]
KV_PLAN = Plan.parse("r1-all:kv")


def own_cache():
    """Pages of every layer, with K and V of six tokens in two blocks that do not follow one another."""
    slots, layers = torch.tensor([34, 35, 36, 37, 4, 5]), {}
    for layer in LAYOUT.kv_layers:
        layers[layer] = own_layer(3, LAYOUT.kv_heads, 64, 16)
        for side, (kind, q) in enumerate(rounded(6, LAYOUT.kv_heads, 64, layer).items()):
            store(layers[layer].kv_cache, LAYOUT.kv_heads, 64, slots, q, side, kind == Kind.V)
    return slots, layers


WIDE = dataclasses.replace(LAYOUT, head_dim=64, v_head_dim=64)


def record(kind_of_slots, slots, pool, store_):
    sizes = {"slots": 48, "step_tokens": 8, "dtype": torch.bfloat16, "device": CPU, "pool": pool}
    found = Recorder(WIDE, SPEC, KV_PLAN, store_, **sizes)
    parts = []
    for first, last in ((0, 4), (4, 6)):
        where = slots[first:last] if kind_of_slots == "connector" else torch.arange(last - first)
        found.begin(where, torch.arange(first, last), torch.tensor(TOKENS[first:last]), slots[first:last])
        if kind_of_slots == "connector":
            found.keep(found.end())
        else:
            parts.append(TraceCapturer(found).snapshot_routing_data(last - first))
    return found, parts


def test_both_ways_out_make_the_same_frame_of_vllms_own_pages():
    slots, layers = own_cache()
    kept, pool = MemoryStore(), find_cache(told(emulate=False), layers)
    found, _ = record("connector", slots, pool, kept)
    by_slot = found.collect(slots, TOKENS, "slots")
    _, parts = record("rows", slots, pool, kept)
    # When the request's output arrives, its blocks are another's.
    for layer in layers.values():
        layer.kv_cache.fill_(255)
    reader = FrameReader(WIDE, SPEC, KV_PLAN, kept)
    by_row = reader.read(torch.cat(parts).numpy(), TOKENS, "rows")
    assert by_slot.invalid_rows == by_row.invalid_rows == 0
    assert bytes(kept.get(by_slot.guidance)) == bytes(kept.get(by_row.guidance))
    frame = decode(kept.get(by_row.guidance))
    for layer in LAYOUT.kv_layers:
        for kind, q in rounded(6, LAYOUT.kv_heads, 64, layer).items():
            outcome = frame.sites[Site(layer, kind)].outcome()
            assert torch.equal(outcome.low.view(q.codes.shape), q.codes & 1)
            assert torch.equal(outcome.scales.view(q.scales.shape), q.scales)
    with pytest.raises(GuidanceCorrupt, match="bytes each"):
        reader.read(torch.cat(parts).numpy()[:, :-1], TOKENS, "short")


def test_rows_of_a_plan_with_k_and_v_need_pages():
    found, _ = record("connector", torch.arange(6), None, MemoryStore())
    found.pool = None
    with pytest.raises(EngineError, match="no FP4 pages"):
        TraceCapturer(found).snapshot_routing_data(1)
    with pytest.raises(EngineError, match="layer 7 has no attention layer"):
        CachePages({}, read_own_pages).stored([7], Kind.K, torch.tensor([0]))


# -- Our own pages


@pytest.mark.parametrize("spec", ["nvfp4-kv4", "mxfp4-w4a4-kv4"])
def test_pages_give_back_what_was_written_in_both_arrangements(arranged, spec):
    numerics = get_spec(spec).kv
    width = row_bytes(2, 64, numerics.block)
    assert width % 32 == 0 and width >= 2 * 64 + 2 * 2 * 64 // numerics.block
    cache = torch.randint(0, 255, (3, 1, 16, width), dtype=torch.uint8)
    form = row_format(2, 64, numerics, torch.bfloat16, CPU)
    assert form.for_kernels == (arranged == "kernels")
    plane, slots = plane_of(cache, form), torch.tensor([40, 3, 17, 47])
    before = cache.clone()
    k, v = torch.randn(2, 4, 2, 64).bfloat16()
    plane.write(slots, {Kind.K: k, Kind.V: v})
    changed = (cache != before).view(48, width).any(dim=1)
    assert set(changed.nonzero().flatten().tolist()) <= set(slots.tolist())
    for kind, x in ((Kind.K, k), (Kind.V, v)):
        q = quantize(x, numerics)
        codes, scales = plane.stored(kind, slots)
        assert torch.equal(e2m1.unpack(codes), q.codes) and torch.equal(scales, q.scales)
        assert torch.equal(plane.read(slots)[kind], q.dequantize(torch.bfloat16))


def test_caches_that_are_no_pages_of_ours_are_refused():
    form = row_format(2, 64, SPEC.kv, torch.float32, CPU)
    with pytest.raises(EngineError, match="FP4 pages are uint8"):
        plane_of(torch.zeros(3, 2, 16, 160, dtype=torch.uint8), form)
    with pytest.raises(EngineError, match="without gaps"):
        plane_of(torch.zeros(6, 1, 16, 160, dtype=torch.uint8)[::2], form)
    with pytest.raises(EngineError, match="whole blocks of 16"):
        row_bytes(2, 40, 16)


# -- Who gets which


def told(**changes):
    made = {"model": "", "folder": "", "deployed": dump_spec(SPEC), "planned": "none"}
    return EngineSettings(**{**made, **changes})


def test_pages_are_taken_on_a_gpu_and_where_they_are_asked_for():
    bf16 = get_spec("bf16")
    assert packs_pages(SPEC, "cuda", {})
    assert packs_pages(SPEC, "cuda", {"attention_backend": "custom"})
    assert packs_pages(SPEC, "cpu", {"attention_backend": "CUSTOM"})
    assert not packs_pages(SPEC, "cpu", {})
    assert not packs_pages(bf16, "cuda", {"attention_backend": "FLASHINFER"})
    with pytest.raises(EngineError, match="'FLASH_ATTN' does not know FP4 pages"):
        packs_pages(SPEC, "cuda", {"attention_backend": "FLASH_ATTN"})
    with pytest.raises(EngineError, match="spec 'bf16' has none"):
        packs_pages(bf16, "cpu", {"attention_backend": "CUSTOM"})


def test_k_and_v_are_read_where_they_lie():
    ours = types.SimpleNamespace(impl=types.SimpleNamespace(plane=None))
    theirs = types.SimpleNamespace(impl=types.SimpleNamespace())
    assert isinstance(find_cache(told(), {0: ours}), CachePages)
    assert isinstance(find_cache(told(emulate=False), {0: theirs}), CachePages)
    assert find_cache(told(), {0: theirs}) is None
    assert find_cache(told(deployed=dump_spec(get_spec("nvfp4-w4a4"))), {0: ours}) is None


def test_the_table_says_where_k_and_v_lie_and_what_was_not_run(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: [hook.target for hook in HOOKS])
    plan = Plan.parse("r1-all:kv")
    lines = {line.site: line for line in site_table(SPEC, plan, "cuda", paged=True)}
    assert lines["k"].state == "expected, not run" and "FP4 pages" in lines["k"].note
    assert "FP4 pages" not in lines["experts_in"].note
    assert "codes beside them" in {x.site: x for x in site_table(SPEC, plan, "cpu")}["v"].note
    own = [line for line in native_lines() if line.path == CACHE]
    assert [(x.site, x.state, x.codes) for x in own] == [(s, "expected, not run", True) for s in "kv"]
    check_plan(plan, observed("marlin"), observed=True)
    for cache, words in (("auto", "does not quantize"), ("nvfp4_4over6", "does not show here")):
        with pytest.raises(EngineError, match=f"--kv-cache-dtype {cache} {words}"):
            check_plan(plan, observed("marlin", cache), observed=True)
    layer = types.SimpleNamespace
    assert cache_type({0: layer(kv_cache_dtype="auto"), 1: layer(kv_cache_dtype="nvfp4")}) == "nvfp4"
    assert cache_type({0: layer(kv_cache_dtype="fp8")}) == "fp8"
    assert cache_type({}) == ""


# -- With vLLM's own classes


@pytest.fixture
def settings(tmp_path, monkeypatch):
    told().write(tmp_path / "settings.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "settings.json"))


class Stand(types.ModuleType):
    """A module of CUDA libraries: every name is an empty class."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__, self.__spec__ = [], importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture
def on_cuda(monkeypatch):
    """Imports a module of vLLM that only a CUDA build can import."""
    libraries = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")

    def find(name):
        with monkeypatch.context() as patch:
            for library in (*libraries, "vllm._C_stable_libtorch"):
                patch.setitem(sys.modules, library, Stand(library))
            patch.delitem(sys.modules, name, raising=False)
            module = importlib.import_module(name)
            package, _, last = name.rpartition(".")
            patch.setattr(sys.modules[package], last, module, raising=False)
        sys.modules.pop(name, None)
        return module

    return find


def views(spec, blocks, layers, layout, block_size=None):
    """vLLM's own views of a fresh cache."""
    from vllm.v1 import kv_cache_interface as kv

    strides = kv.compute_layout_strides(spec, blocks, layers, layout)
    size = spec.page_size_bytes * blocks * layers
    names = [str(i) for i in range(layers)]
    tensor = types.SimpleNamespace(layers=names, layer_stride=strides[0], block_stride=strides[1], offset=0)
    raw = torch.randint(0, 100, (size,), dtype=torch.int8)
    return kv.create_kv_cache_views(raw, spec, blocks, layout, tensor, kernel_block_size=block_size)


@needs_vllm
@pytest.mark.engine
@pytest.mark.parametrize(
    ("layout", "fa2", "kernel_block"),
    [("LBHNC", False, None), ("BLHNC", False, None), ("LBNHC", True, None), ("LBHNC", True, 16)],
)
def test_vllms_own_views_of_its_pages_show_what_we_read(on_cuda, layout, fa2, kernel_block):
    """Spec, allocation and views are vLLM's; what its store kernels write through them is random bytes."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVQuantMode

    flashinfer = on_cuda("vllm.v1.attention.backends.flashinfer")
    heads, width, tokens = 2, 128, 32
    sizes = {"block_size": tokens, "num_kv_heads": heads, "head_size": width, "dtype": torch.uint8}
    spec = flashinfer.FlashInferBackend.customize_spec(FullAttentionSpec(**sizes, kv_quant_mode=KVQuantMode.NVFP4))
    for cache in views(spec, 3, 2, KVCacheLayout[layout], kernel_block):
        size = cache.shape[2]
        (k, v), (k_scales, v_scales), order = flashinfer._nvfp4_kv_views(cache, heads)
        parts = {Kind.K: (k, k_scales), Kind.V: (v, v_scales)}
        layer = own_layer(1, heads, width, size, fa2=fa2)
        layer.kv_cache = cache
        slots = torch.randperm(3 * tokens)[:40]
        for kind, (data, scales) in parts.items():
            codes, found = read_own_pages(layer, kind, slots)
            for row, slot in enumerate(slots.tolist()):
                page, t = slot // size, slot % size
                for h in range(heads):
                    at = (page, h, t) if order == "HND" else (page, t, h)
                    assert torch.equal(codes[row, h], data[at])
                    if kind == Kind.V and not fa2:
                        moved = scales.view(torch.uint8)[page, h]  # (tokens, blocks)
                        for b in range(width // 16):
                            q = width // 64
                            assert found[row, h, b] == moved[t // 4 * 4 + b // q, b % q * 4 + t % 4]
                    else:
                        assert torch.equal(found[row, h], scales.view(torch.uint8)[at])


@needs_vllm
@pytest.mark.engine
def test_the_tested_release_has_what_is_read_of_its_cache(on_cuda):
    import inspect

    flashinfer = on_cuda("vllm.v1.attention.backends.flashinfer")
    source = inspect.getsource(flashinfer.FlashInferImpl.__init__)
    for name in ("is_kvcache_nvfp4", "nvfp4_fa2", "num_kv_heads", "head_size"):
        assert f"self.{name} =" in source
    store_ = inspect.getsource(flashinfer.FlashInferImpl.do_kv_cache_update)
    # FA2 has a store kernel of FlashInfer's, which moves nothing; TRT-LLM has vLLM's own.
    theirs, own = store_.index("nvfp4_quantize_append"), store_.index("_C_cache_ops.reshape_and_cache_flash")
    assert store_.index("nvfp4_fa2") < theirs < own
    attention = importlib.import_module("vllm.model_executor.layers.attention.attention")
    assert "layer._k_scale_float" in inspect.getsource(attention.set_default_quant_scales)


@needs_vllm
@pytest.mark.engine
def test_a_gpu_is_given_the_backend_that_was_registered(settings, on_cuda, monkeypatch):
    """vLLM's selection for CUDA, with a stand-in for the device alone."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from tracefp4.integrations.vllm.paged import PagedBackend
    from tracefp4.integrations.vllm.plugin import register

    register()
    cuda = on_cuda("vllm.platforms.cuda").CudaPlatformBase
    monkeypatch.setattr(cuda, "get_device_capability", classmethod(lambda cls, *_: DeviceCapability(9, 0)))
    asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}

    def chosen(**changes):
        return cuda.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, AttentionSelectorConfig(**{**asked, **changes}))

    path = f"{PagedBackend.__module__}.{PagedBackend.__qualname__}"
    assert chosen() == path
    assert chosen(has_sliding_window=True, has_sink=True, use_kv_connector=True, head_size=80) == path
    for changes in ({"head_size": 72}, {"kv_cache_dtype": "fp8"}, {"use_mla": True}, {"block_size": 24}):
        with pytest.raises(ValueError, match="not valid for"):
            chosen(**changes)
    assert AttentionBackendEnum[PagedBackend.get_name()].get_class() is PagedBackend


@needs_vllm
@pytest.mark.engine
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_vllm_allocates_pages_that_a_plane_fits_over(settings, layout):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
    from vllm.v1.worker.utils import customize_attention_spec

    from tracefp4.integrations.vllm.paged import PagedBackend

    whole = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    spec = customize_attention_spec(PagedBackend, whole)
    assert spec.page_size_bytes == 32 * row_bytes(2, 64, 16)
    assert whole.page_size_bytes / spec.page_size_bytes > 3
    assert KVCacheLayout[layout] in PagedBackend.supported_kv_cache_layouts()
    form = row_format(2, 64, SPEC.kv, torch.float32, CPU)
    caches = views(spec, 4, 3, KVCacheLayout[layout])
    written = {}
    for index, cache in enumerate(caches):
        k, v = torch.randn(2, 128, 2, 64, generator=torch.Generator().manual_seed(index))
        plane_of(cache, form).write(torch.arange(128), {Kind.K: k, Kind.V: v})
        written[index] = quantize(v, SPEC.kv)
    for index, cache in enumerate(caches):
        codes, _ = plane_of(cache, form).stored(Kind.V, torch.arange(128))
        assert torch.equal(e2m1.unpack(codes), written[index].codes)
    # The blocks that a slot is counted in are vLLM's.
    plane = plane_of(caches[1], form)
    assert torch.equal(plane.codes[2 * 32 + 5], caches[1][2, 0, 5, : form.code_bytes])
    with pytest.raises(EngineError, match="FP4 pages hold one"):
        PagedBackend.customize_spec(dataclasses.replace(whole, head_size_v=32))


@needs_vllm
@pytest.mark.engine
def test_vllm_is_asked_for_pages_and_for_no_more_memory_than_they_take(settings, tmp_path):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tracefp4.integrations.vllm.paged import PagedBackend

    sizes = {"block_size": 16, "blocks": 10, "max_batch": 4, "prefill_chunk": 32, "max_length": 160}
    asked = read_arguments({"dtype": "bfloat16", "device": "cuda", **sizes})
    plain, pages = (engine_arguments(tmp_path, asked, WIDE, pages=kv) for kv in (None, SPEC.kv))
    assert (plain.attention_backend, pages.attention_backend) == (None, "CUSTOM")
    whole = FullAttentionSpec(block_size=16, num_kv_heads=LAYOUT.kv_heads, head_size=64, dtype=torch.bfloat16)
    for made, spec in ((plain, whole), (pages, PagedBackend.customize_spec(whole))):
        assert made.kv_cache_memory_bytes == 11 * len(LAYOUT.kv_layers) * spec.page_size_bytes


@needs_vllm
@pytest.mark.engine
def test_the_backend_needs_settings(monkeypatch):
    from tracefp4.integrations.vllm.paged import kv_numerics

    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(EngineError, match="FP4 KV cache; it needs the settings file"):
        kv_numerics()


PAGE = 16


class Attended:
    """One layer of the backend over real metadata of vLLM: ``lengths`` tokens so far, ``new`` of them in this pass."""

    def __init__(self, monkeypatch, dtype, width, heads=4, kv_heads=2, **impl):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from tracefp4.integrations.vllm import paged

        config = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(max_num_seqs=8),
            model_config=types.SimpleNamespace(dtype=dtype),
            parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
            speculative_config=None,
        )
        monkeypatch.setattr(paged, "get_current_vllm_config", lambda: config)
        self.impl = paged.PagedAttention(heads, width, width**-0.5, kv_heads, **impl)
        whole = FullAttentionSpec(block_size=PAGE, num_kv_heads=kv_heads, head_size=width, dtype=dtype)
        spec = paged.PagedBackend.customize_spec(whole)
        self.builder = paged.PagedMetadataBuilder(spec, ["model.layers.0.attn"], config, CPU)
        self.cache = torch.zeros(40, 1, PAGE, row_bytes(kv_heads, width, 16), dtype=torch.uint8)
        self.layer = types.SimpleNamespace(layer_name="model.layers.0.attn")
        self.dtype, self.shape = dtype, (kv_heads, width)

    def run(self, lengths, new, *, seed=0, spare=2, causal=True):
        """Queries, output, and K and V of each request as they were given."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(39, generator=generator) + 1
        table, tokens = torch.zeros(len(lengths), 12, dtype=torch.int32), []
        for row, length in enumerate(lengths):
            pages, free = free[: -(-length // PAGE)], free[-(-length // PAGE) :]
            table[row, : len(pages)] = pages
            kv = torch.randn(2, length, *self.shape, generator=generator).to(self.dtype)
            slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()[:length]
            tokens.append((kv, slots))
            old = length - new[row]
            if old:
                self.impl.do_kv_cache_update(self.layer, kv[0, :old], kv[1, :old], self.cache, slots[:old])
        starts = torch.tensor([0, *new]).cumsum(0).int()
        count = int(starts[-1])
        fresh = [torch.cat([kv[i, len(s) - n :] for (kv, s), n in zip(tokens, new, strict=True)]) for i in range(2)]
        # vLLM pads keys and slots of a batch; padding has slot -1.
        padded = [torch.cat([x, torch.full((spare, *self.shape), 7.0).to(self.dtype)]) for x in fresh]
        slots = torch.cat([s[len(s) - n :] for (_, s), n in zip(tokens, new, strict=True)])
        slots = torch.cat([slots, torch.full((spare,), -1)])
        self.impl.do_kv_cache_update(self.layer, *padded, self.cache, slots)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(lengths),
            num_actual_tokens=count,
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=causal,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        )
        metadata = self.builder.build(0, common)
        q = torch.randn(count + spare, self.impl.num_heads, self.shape[1], generator=generator).to(self.dtype)
        out = torch.full_like(q, 9.0)
        assert self.impl.forward(self.layer, q, *padded, self.cache, metadata, output=out) is out
        assert torch.equal(out[count:], torch.full_like(out[count:], 9.0))
        return q, out, [kv for kv, _ in tokens], starts.tolist()

    def expected(self, q, tokens, starts):
        """Attention over what the numerics make of K and V, request by request."""
        parts = []
        for kv, start, stop in zip(tokens, starts, starts[1:], strict=False):
            k, v = (quantize(x, SPEC.kv).dequantize(self.dtype).transpose(0, 1).unsqueeze(0) for x in kv)
            part, scaling = q[start:stop].transpose(0, 1).unsqueeze(0), self.impl.scale
            out = dense_attention(part, k, v, scaling=scaling, window=self.impl.window, sinks=self.impl.sinks)
            parts.append(out[0])
        return torch.cat(parts)


BATCHES = [([5, 33, 17, 40, 3], [1, 1, 1, 20, 3]), ([1, 40, 16], [1, 1, 1]), ([35, 2], [35, 2])]
"""Decodes and prompts, of which one is a chunk; decodes alone; prompts alone."""


@needs_vllm
@pytest.mark.engine
@pytest.mark.parametrize(("lengths", "new"), BATCHES)
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 12}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.bfloat16, 80)])
def test_the_backend_attends_to_what_its_pages_hold(monkeypatch, settings, lengths, new, extra, dtype, width):
    layer = Attended(monkeypatch, dtype, width, **extra)
    q, out, tokens, starts = layer.run(lengths, new)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(out[: starts[-1]], layer.expected(q, tokens, starts), **tolerance)


@needs_vllm
@pytest.mark.engine
@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="interprets Triton's kernels")
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 12, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_its_kernels_attend_to_the_same(monkeypatch, settings, extra):
    """As on a GPU: K and V appended, decoded and prefilled by the Triton kernels, here interpreted."""
    with interpreted():
        layer = Attended(monkeypatch, torch.bfloat16, 64, **extra)
        assert layer.impl.plane(layer.cache).format.for_kernels
        called = []
        for name in ("attention_decode.decode_attention", "attention_prefill.prefill_attention", "kv_append.append"):
            module, _, function = name.partition(".")
            original = getattr(importlib.import_module(f"tracefp4.kernels.{module}"), function)

            def seen(*args, _name=function, _original=original, **kwargs):
                called.append(_name)
                return _original(*args, **kwargs)

            monkeypatch.setattr(f"tracefp4.kernels.{module}.{function}", seen)
        q, out, tokens, starts = layer.run([5, 33, 18, 3], [1, 1, 5, 3])
        assert set(called) == {"decode_attention", "prefill_attention", "append"}
        torch.testing.assert_close(out[: starts[-1]], layer.expected(q, tokens, starts), rtol=3e-2, atol=2e-2)


@needs_vllm
@pytest.mark.engine
def test_what_the_backend_cannot_compute_is_refused(monkeypatch, settings):
    for options in ({"alibi_slopes": [1.0]}, {"logits_soft_cap": 30.0}, {"kv_sharing_target_layer_name": "a"}):
        with pytest.raises(EngineError, match="not computed over FP4 pages"):
            Attended(monkeypatch, torch.float32, 64, **options)
    layer = Attended(monkeypatch, torch.float32, 64)
    with pytest.raises(EngineError, match="causally"):
        layer.run([4], [4], causal=False)
    x = torch.zeros(1, 4, 64)
    with pytest.raises(EngineError, match="fused output quantization"):
        layer.impl.forward(layer.layer, x, x, x, layer.cache, None, output=x, output_scale=torch.ones(1))
    assert not layer.impl.forward(layer.layer, x, x, x, layer.cache, None, output=torch.ones(1, 4, 64)).any()


@needs_vllm
@pytest.mark.engine
def test_only_decode_steps_of_kernels_are_offered_to_cuda_graphs():
    from vllm.v1.attention.backend import AttentionCGSupport

    from tracefp4.integrations.vllm.paged import PagedMetadataBuilder

    def support(width, dtype):
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=dtype))
        return PagedMetadataBuilder.get_cudagraph_support(config, types.SimpleNamespace(head_size=width))

    assert support(128, torch.bfloat16) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(80, torch.bfloat16) is support(128, torch.float16) is AttentionCGSupport.NEVER
