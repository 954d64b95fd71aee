"""Storing K and V and attending to them: words and scales exactly, attention up to the order of additions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tracefp4.evaluation.bench_kernels import ATTENTION, attention_configs
from tracefp4.evaluation.bench_prefill import prefill_configs
from tracefp4.formats import blocks, words
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import get_numerics

GPU = torch.cuda.is_available()
FORMATS = ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "sglang-kv-mx", None]


def numerics_of(name):
    n = get_numerics(name)
    return n if n.scope == "none" else replace(n, scope="constant")


def filled(name, device, *, tokens, heads, width, seed=0, page=16):
    """A pool with ``tokens`` random tokens in scattered pages, its block table, and the values it stands for."""
    from tracefp4.kernels.kv_append import append, pool_tensors

    generator = torch.Generator().manual_seed(seed)
    pages = -(-tokens // page)
    table = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(page))[:pages]
    position = torch.arange(tokens)
    slots = table[position // page] * page + position % page
    kv = pool_tensors((pages + 3) * page, heads, width, rules(numerics_of(name)) if name else None, device)
    kv = replace(kv, page=page)
    kv.codes.fill_(-7)  # what nobody wrote must not matter
    if kv.scales is not None:
        kv.scales.fill_(130)
    k, v = (torch.randn(heads, tokens, width, generator=generator).to(torch.bfloat16) for _ in range(2))
    any_rules = rules(numerics_of(name or "mxfp4-ceil"))
    # V with other strides than K, as it comes from a joined product.
    both = torch.cat([v, torch.zeros_like(v)], dim=-1).to(device)[..., :width]
    append(k.transpose(0, 1).to(device), both.transpose(0, 1), kv, any_rules, slots.to(device))
    return kv, table, slots, k, v


def stands_for(x, name):
    return x if name is None else blocks.quantize(x, numerics_of(name)).dequantize(torch.bfloat16)


def attention(q, k, v, scaling, window=None, sinks=None, before=0):
    """``(S, Hq, D)`` in float64; query ``i`` stands at position ``before + i``."""
    group = q.shape[1] // k.shape[0]
    k, v = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    logits = torch.einsum("shd,htd->hst", q.double(), k) * scaling
    query, token = (torch.arange(n, device=q.device) for n in (q.shape[0], k.shape[1]))
    distance = before + query[:, None] - token
    hidden = (distance < 0) | (distance >= (window or 1 << 30))
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        logits = torch.cat([logits, extra], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[1]]
    return torch.einsum("hst,htd->shd", weights, v)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_the_pool_holds_what_the_plain_code_makes(name, width, device, same):
    kv, _, slots, k, v = filled(name, device, tokens=5, heads=2, width=width)
    both = torch.stack([k, v], dim=1).flatten(0, 1).transpose(0, 1)  # (T, heads x 2, D)
    stored = kv.codes.cpu()[slots]
    if name is None:
        assert same(stored, both.flatten(1))
        return
    q = blocks.quantize(both.contiguous(), numerics_of(name))
    assert same(stored, words.to_words(q.codes).flatten(1))
    expected = words.recode(q.scales) if numerics_of(name).scale_format == "e4m3" else q.scales
    assert same(kv.scales.cpu()[slots], expected.flatten(1))
    others = torch.ones(len(kv.codes), dtype=torch.bool)
    others[slots] = False
    assert (kv.codes.cpu()[others] == -7).all() and (kv.scales.cpu()[others] == 130).all()


def test_every_scale_byte_is_recoded(device, same):
    from tracefp4.kernels.kv_append import append, pool_tensors

    n = numerics_of("nvfp4-te")
    data = torch.arange(127, dtype=torch.uint8)
    x = torch.zeros(128, 1, 64, dtype=torch.float32)
    x[:127, 0, ::16] = (6 * data.view(torch.float8_e4m3fn).float())[:, None]
    kv = pool_tensors(128, 1, 64, rules(n), device)
    append(x.to(device), x.to(device), kv, rules(n), torch.arange(128, device=device))
    assert same(kv.scales[:127].cpu(), words.recode(data)[:, None].expand(-1, 8))


@pytest.mark.parametrize("name", ["nvfp4-te", None])
@pytest.mark.parametrize("norm", [None, "times", "added"])
@pytest.mark.parametrize(
    "width, queries, part, gated", [(64, 6, 64, False), (128, 1, 128, False), (64, 2, 32, True), (256, 5, 64, True),
                                    (128, 4, 48, False), (64, 3, 64, True)],
)  # fmt: skip
def test_heads_are_normed_turned_and_stored_in_one_launch(name, norm, width, queries, part, gated, device, same):
    """From the columns of a joined product, queries beside their gates: the bits of the eager code, step by step."""
    from tracefp4.kernels.kv_append import append, append_heads, pool_tensors
    from tracefp4.models.norms import plain_norm
    from tracefp4.models.rotary import turned

    made, generator = rules(numerics_of(name)) if name else None, torch.Generator().manual_seed(1)
    # Squares of these add up exactly, so that the order does not matter: whole numbers up to 2^16, some zero.
    x = torch.randint(-255, 256, (6, queries * (1 + gated) + 4, width), generator=generator).bfloat16().to(device)
    x[0, -4] = 0.0
    cos, sin = torch.randn(2, 6, part, generator=generator).bfloat16().to(device)
    weights = torch.randn(2, width, generator=generator).bfloat16().to(device)
    q, k, v = x.split((queries * (1 + gated), 2, 2), dim=1)
    if gated:
        q = q.unflatten(1, (queries, -1)).flatten(2)[..., :width]
        assert q.stride(1) == 2 * width
    parts = [plain_norm(p, w, 1e-6, added=norm == "added") if norm else p for p, w in zip((q, k), weights, strict=True)]
    q_expected, k_expected = (turned(p, cos[:, None], sin[:, None]) for p in parts)
    slots = torch.tensor([3, 0, 7, 1, 6, 2], device=device)
    pools = [pool_tensors(8, 2, width, made, device) for _ in range(2)]
    append(k_expected, v, pools[0], made, slots)
    norms = (*weights, 1e-6, norm == "added") if norm else None
    assert same(append_heads(q, k, v, pools[1], made, slots, (cos, sin), norms), q_expected)
    assert same(pools[1].codes, pools[0].codes)
    assert name is None or same(pools[1].scales, pools[0].scales)


@pytest.mark.parametrize("added", [False, True])
def test_a_norm_differs_from_the_eager_one_by_the_order_of_its_sum_alone(added, device):
    """One value of some ten thousand rounds the other way."""
    from tracefp4.kernels.kv_append import append_heads, pool_tensors
    from tracefp4.models.norms import plain_norm

    x = torch.randn(256, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    weights = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    still = torch.ones_like(x[:1, 0]), torch.zeros_like(x[:1, 0])
    kv, slots, norms = pool_tensors(256, 1, 64, None, device), torch.arange(256, device=device), (*weights, 1e-6, added)
    found = append_heads(x[:, :4], x[:, 4:5], x[:, 5:], kv, None, slots, still, norms)
    expected = [plain_norm(p, w, 1e-6, added=added) for p, w in zip((x[:, :4], x[:, 4:5]), weights, strict=True)]
    found, expected = torch.cat([found, kv.codes[:, None, :64]], dim=1).float(), torch.cat(expected, dim=1).float()
    assert (found != expected).float().mean() < 2e-4
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.0)


def test_one_angle_turns_all_tokens(device, same):
    from tracefp4.kernels.kv_append import append_heads, pool_tensors
    from tracefp4.models.rotary import turned

    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 5, 2, 64, generator=generator).bfloat16()
    cos, sin = torch.randn(2, 1, 64, generator=generator).bfloat16()
    kv, slots = pool_tensors(5, 2, 64, None, device), torch.arange(5, device=device)
    found = append_heads(
        q.to(device), k.to(device), v.to(device), kv, None, slots, (cos.to(device), sin.to(device)), None
    )
    assert same(found.cpu(), turned(q, cos[:, None], sin[:, None]))


def assert_near(found, q, k, v, name, lengths):
    """Attention of a query of each sequence over its first tokens, ``k`` and ``v`` as the pool holds them."""
    k, v = stands_for(k, name), stands_for(v, name)
    for i, length in enumerate(lengths):
        expected = attention(q[i : i + 1].cpu(), k[:, :length], v[:, :length], q.shape[2] ** -0.5, before=length - 1)
        assert (found[i : i + 1].double() - expected).abs().max() < 0.02


def shapes():
    """Interpreting takes seconds a case: every format once and every width once by default, all pairs with -m slow."""
    for width, heads, group in ((64, 1, 4), (128, 1, 8), (256, 2, 3)):
        for name in FORMATS:
            quick = width == 64 or (name == "nvfp4-te")
            yield pytest.param(name, width, heads, group, marks=[] if quick or GPU else [pytest.mark.slow])


@pytest.mark.parametrize("name, width, heads, group", list(shapes()))
def test_decode_attention(name, width, heads, group, device):
    from tracefp4.kernels.attention_decode import decode_attention

    kv, table, _, k, v = filled(name, device, tokens=43, heads=heads, width=width)
    lengths = torch.tensor([43, 1])
    q = torch.randn(2, heads * group, width, generator=torch.Generator().manual_seed(5)).bfloat16()
    pages = table.expand(2, -1).contiguous().to(device)
    options = {"span": 32, "rows": 16} if device.type == "cpu" else {"span": 64}
    found = decode_attention(q.to(device), kv, pages, lengths.to(device), width**-0.5, **options).cpu()
    assert found.dtype == torch.bfloat16
    assert_near(found, q, k, v, name, lengths.tolist())


@pytest.mark.parametrize("page", [1, 24, 32, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_pages_of_any_size_are_the_same_bits(page, window, device, same):
    from tracefp4.kernels.attention_decode import decode_attention

    rows, span = (16, 32) if device.type == "cpu" else (32, 64)
    lengths = torch.tensor([3 * rows, 2 * rows + 5], device=device)  # whole tiles, and a part of one behind them
    found = []
    for size in (16, page):
        kv, table, _, _, _ = filled("nvfp4-te", device, tokens=3 * rows, heads=1, width=64, page=size)
        q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
        pages = table.expand(2, -1).contiguous().to(device)
        found.append(decode_attention(q, kv, pages, lengths, 0.125, window, span=span, rows=rows).cpu())
    assert same(*found) and found[0].float().abs().max() > 0


@pytest.mark.parametrize("page, span, rows", [(32, 16, 32), (16, 48, 32), (64, 48, 32)])
def test_splits_that_are_no_whole_tiles(page, span, rows, device):
    from tracefp4.kernels.attention_decode import decode_attention

    kv, table, _, k, v = filled("nvfp4-te", device, tokens=80, heads=1, width=64, page=page)
    lengths, q = torch.tensor([80, 53]), torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    pages = table.expand(2, -1).contiguous().to(device)
    found = decode_attention(q.to(device), kv, pages, lengths.to(device), 0.125, span=span, rows=rows).cpu()
    assert_near(found, q, k, v, "nvfp4-te", lengths.tolist())


def configurations():
    """All that the benchmark times. An interpreter knows neither warps nor stages, so one of a width does there."""
    for shape, (heads, kv_heads, width) in ATTENTION.items():
        for index, config in enumerate(attention_configs()):
            for name in ("nvfp4-te", "mxfp4-ceil", None):
                quick = GPU or (shape == "gpt-oss" and index == 0 and name != "mxfp4-ceil")
                marks = [] if quick else [pytest.mark.slow]
                yield pytest.param(name, width, heads // kv_heads, config, marks=marks, id=f"{shape}-{name}-{index}")


@pytest.mark.parametrize("name, width, group, config", list(configurations()))
def test_every_configuration_of_the_benchmark(name, width, group, config, device):
    """Several splits, an end in the middle of a tile, and one token, in the tiles that are timed."""
    from tracefp4.kernels.attention_decode import decode_attention

    span, rows = config.get("span", 1024), config.get("rows", 32)
    tokens = 2 * span + 77 if device.type == "cuda" else 77
    kv, table, _, k, v = filled(name, device, tokens=tokens, heads=2, width=width)
    lengths = [tokens, 1, rows + 1, tokens - span] if device.type == "cuda" else [tokens, 1, rows + 1]
    q = torch.randn(len(lengths), 2 * group, width, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = decode_attention(
        q.to(device), kv, table.expand(len(lengths), -1).contiguous().to(device),
        torch.tensor(lengths, device=device), width**-0.5, **config,
    ).cpu()  # fmt: skip
    assert_near(found, q, k, v, name, lengths)


@pytest.mark.parametrize(
    "name, width, group",
    [
        ("mxfp4-ceil", 128, 8),
        pytest.param("mxfp4-ceil", 128, 5, marks=[] if GPU else [pytest.mark.slow]),
        pytest.param("nvfp4-te", 64, 4, marks=[] if GPU else [pytest.mark.slow]),
    ],
)
def test_a_limit_on_registers_changes_no_bit(name, width, group, device, same, monkeypatch):
    """Heads of 128 in MXFP4 are limited by default, others where the benchmark tries it; 255 is all that there are."""
    from tracefp4.kernels import attention_decode

    tokens, heads, options = (2125, 2, {}) if device.type == "cuda" else (43, 1, {"span": 32, "rows": 16})
    kv, table, *_ = filled(name, device, tokens=tokens, heads=heads, width=width)
    lengths = torch.tensor([tokens, 17, 1, tokens // 2][: 2 * heads], device=device)
    q = torch.randn(len(lengths), heads * group, width, generator=torch.Generator().manual_seed(5))
    q, pages = q.bfloat16().to(device), table.expand(len(lengths), -1).contiguous().to(device)
    limits, own = [], attention_decode._split.run
    monkeypatch.setattr(attention_decode._split, "run", lambda *a, **k: limits.append(k["maxnreg"]) or own(*a, **k))
    wanted = [255, None, *sorted({config["registers"] for config in attention_configs() if "registers" in config})]
    found = [
        attention_decode.decode_attention(q, kv, pages, lengths, width**-0.5, registers=registers, **options)
        for registers in wanted
    ]
    assert limits == [255, 128 if name == "mxfp4-ceil" else None, *wanted[2:]] and len(limits) > 2
    assert all(same(one, found[0]) for one in found[1:]) and found[0].isfinite().all()


@pytest.mark.parametrize("name", ["nvfp4-te", None])
def test_a_pool_too_large_for_32_bits(name, device, monkeypatch):
    """On a GPU one with tokens beyond 2^31 places of the codes; elsewhere it is only said to be so large."""
    from tracefp4.kernels import attention_decode

    tokens, width = 40, 64
    kv, table, *_ = filled(name, device, tokens=tokens, heads=2, width=width)
    q = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    lengths = torch.tensor([tokens], device=device)
    near = attention_decode.decode_attention(q, kv, table[None].to(device), lengths, width**-0.5)
    if device.type == "cuda":
        far = 2**31 // kv.codes.stride(0) // 16 + 1

        def moved(part):
            large = part.new_empty(16 * far + len(part), *part.shape[1:])
            large[16 * far :] = part
            return large

        kv = replace(kv, codes=moved(kv.codes), scales=None if kv.scales is None else moved(kv.scales))
        table = table + far
    else:
        monkeypatch.setattr(attention_decode, "PLACES", 0)
    found = attention_decode.decode_attention(q, kv, table[None].to(device), lengths, width**-0.5)
    assert torch.equal(found, near)


@pytest.mark.parametrize("slots, narrow", [(1 << 20, True), (1 << 21, False)])
def test_whether_32_bits_reach_a_pool(slots, narrow):
    """Codes are int16 and scales bytes: of rows that hold both, the scales are the ones that lie farther out."""
    from tracefp4.kernels.attention_decode import PagedKV, narrow_places

    rows = torch.empty(slots, 1152, dtype=torch.uint8, device="meta")
    kv = PagedKV(rows[:, :1024].view(torch.int16), rows[:, 1024:], 8, 128)
    assert narrow_places(kv) == narrow
    assert narrow_places(replace(kv, scales=None))


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil", None])
def test_tables_as_long_as_the_longest_context(name, device):
    """Room for 65536 tokens: beside somebody who fills half of it, one token and odd lengths get what they alone do."""
    from tracefp4.kernels.attention_decode import decode_attention

    tokens, width = (32773 if device.type == "cuda" else 69), 64
    kv, table, _, k, v = filled(name, device, tokens=tokens, heads=1, width=width)
    lengths = [1, tokens, 3, 17, tokens // 2 + 1]
    q = torch.randn(len(lengths), 4, width, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    pages = torch.full((len(lengths), 65536 // 16), int(table[-1]))  # what stands past an end is a page of anybody
    pages[:, : len(table)] = table
    pages, there = pages.to(device), torch.tensor(lengths, device=device)
    options = {} if device.type == "cuda" else {"span": 16384, "rows": 32}
    found = decode_attention(q, kv, pages, there, width**-0.5, **options).cpu()
    assert_near(found, q, k, v, name, lengths)


@pytest.mark.parametrize("window", [None, pytest.param(1, marks=pytest.mark.slow), 21])
def test_windows_and_sinks(window, device):
    from tracefp4.kernels.attention_decode import decode_attention

    kv, table, _, k, v = filled("nvfp4-te", device, tokens=43, heads=1, width=64)
    q = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    sinks = torch.linspace(-2, 2, 8)
    options = {"span": 32, "rows": 16} if device.type == "cpu" else {"span": 128}
    found = decode_attention(
        q.to(device), kv, table[None].to(device), torch.tensor([43], device=device), 0.125, window, sinks.to(device),
        **options,
    )  # fmt: skip
    expected = attention(q, stands_for(k, "nvfp4-te"), stands_for(v, "nvfp4-te"), 0.125, window, sinks, before=42)
    assert (found.cpu().double() - expected).abs().max() < 0.02


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil", None])
@pytest.mark.parametrize("with_sinks, window", [(False, None), (True, None), (True, 9)])
def test_one_split_is_finished_where_it_is_made(name, with_sinks, window, device, monkeypatch):
    """Tables of one split need no second kernel, and a sequence is the same bits beside longer ones."""
    from tracefp4.kernels import attention_decode

    kv, table, _, _, _ = filled(name, device, tokens=40, heads=1, width=64)
    q = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    sinks = torch.linspace(-2, 2, 8).bfloat16().to(device) if with_sinks else None
    pages, lengths = table[:2].expand(2, -1).contiguous().to(device), torch.tensor([20, 32], device=device)
    options = {"span": 32, "rows": 16} if device.type == "cpu" else {"span": 32}
    launches = []
    own = attention_decode._combine.run
    monkeypatch.setattr(attention_decode._combine, "run", lambda *a, **k: launches.append(1) or own(*a, **k))
    short = attention_decode.decode_attention(q, kv, pages, lengths, 0.125, window, sinks, **options)
    assert not launches
    wide = torch.cat([pages, pages], 1)  # room for a second split, which nobody has
    long = attention_decode.decode_attention(q, kv, wide, lengths, 0.125, window, sinks, **options)
    assert launches and torch.equal(short, long)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("width, together", [(64, 16), (128, 32)])
def test_many_splits_are_added_up(width, together, with_sinks, device):
    """More than are loaded at once; of one head the first of those have no token, of another all but one."""
    from tracefp4.kernels.attention_decode import _combine

    heads, splits, generator = 3, 2 * together + 5, torch.Generator().manual_seed(7)
    part = torch.randn(heads, splits, width, generator=generator)
    top, total = torch.randn(heads, splits, generator=generator), torch.rand(heads, splits, generator=generator) + 1
    live = torch.ones(heads, splits, dtype=torch.bool)
    live[1, : together + 3], live[2, 1:] = False, False
    top[~live], part[~live] = float("-inf"), float("nan")
    sinks = torch.tensor([0.5, -1.0, 2.0]).bfloat16()
    out = torch.full((heads, width), float("nan"), dtype=torch.bfloat16, device=device)
    _combine[(heads,)](
        part.to(device), top.to(device), total.to(device), sinks.to(device), out, splits, heads, 0.75,
        D=width, SINKS=with_sinks, TOGETHER=together, num_warps=width * together // 1024,
    )  # fmt: skip
    weight = torch.where(live, 2.0 ** top.double(), 0.0)
    sums = (weight * total).sum(1) + (2.0 ** (sinks.double() / math.log(2)) if with_sinks else 0.0)
    expected = 0.75 * (weight[..., None] * part.nan_to_num().double()).sum(1) / sums[:, None]
    assert ((out.cpu().double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize(
    "batch, slots, span",
    [(1, 8192, 64), (1, 32768, 128), (1, 131072, 256), (2, 16384, 64), (8, 65536, 256), (16, 131072, 512),
     (64, 524288, 1024)],
)  # fmt: skip
def test_small_pools_are_cut_into_short_splits(batch, slots, span):
    """About a thousand programs of a full pool of four heads, and splits as measured from 16 sequences on."""
    from tracefp4.kernels.attention_decode import PagedKV, split_for

    codes = torch.empty(slots, 4 * 2 * 32, dtype=torch.int16, device="meta")
    scales = torch.empty(slots, 4 * 2 * 8, dtype=torch.uint8, device="meta")
    assert split_for(batch, PagedKV(codes, scales, 4, 128)) == span


def test_a_sequence_does_not_depend_on_its_batch(device):
    from tracefp4.kernels.attention_decode import decode_attention

    kv, table, _, _, _ = filled("nvfp4-te", device, tokens=40, heads=1, width=64)
    q = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    pages, lengths = table.expand(2, -1).contiguous().to(device), torch.tensor([20, 40], device=device)
    options = {"span": 32, "rows": 16} if device.type == "cpu" else {"span": 64}
    together = decode_attention(q, kv, pages, lengths, 0.125, **options)
    alone = decode_attention(q[1:], kv, pages[1:], lengths[1:], 0.125, **options)
    assert torch.equal(together[1:], alone)


@pytest.mark.parametrize(
    "name, width, queries, window",
    [
        ("nvfp4-te", 64, 11, None),
        ("mxfp4-ceil", 64, 43, 7),
        (None, 64, 1, None),
        pytest.param("nvfp4-te", 128, 43, None, marks=[] if GPU else [pytest.mark.slow]),
        pytest.param("nvfp4-pow2", 256, 20, 16, marks=[] if GPU else [pytest.mark.slow]),
        pytest.param("sglang-kv-mx", 128, 20, None, marks=[] if GPU else [pytest.mark.slow]),
    ],
)
def test_prefill_attention(name, width, queries, window, device):
    from tracefp4.kernels.attention_prefill import prefill_attention

    kv, _, slots, k, v = filled(name, device, tokens=43, heads=1, width=width)
    q = torch.randn(queries + 3, 4, width, generator=torch.Generator().manual_seed(5)).bfloat16()
    sinks = torch.linspace(-2, 2, 4) if window else None
    options = {"rows": 32, "columns": 16} if device.type == "cpu" else {}
    # Two sequences: all 43 tokens, of which the last are asked, and 9 of them in another order, of which 3 are.
    other = [8, 3, 40, 1, 22, 17, 5, 30, 11]
    packed, table = torch.cat([slots, slots[other]]), torch.tensor([[0, queries, 0, 43], [queries, 3, 43, 9]])
    found = prefill_attention(
        q.to(device), kv, packed.to(device), table.to(device), max(queries, 3), width**-0.5, window,
        None if sinks is None else sinks.to(device), **options,
    )  # fmt: skip
    k, v = stands_for(k, name), stands_for(v, name)
    expected = attention(q[:queries], k, v, width**-0.5, window, sinks, 43 - queries)
    assert (found[:queries].cpu().double() - expected).abs().max() < 0.02
    expected = attention(q[queries:], k[:, other], v[:, other], width**-0.5, window, sinks, 6)
    assert (found[queries:].cpu().double() - expected).abs().max() < 0.02


@pytest.mark.parametrize("width", [128, 256])
def test_prefill_attention_over_bfloat16_wider_heads(width, device):
    check_chunk(None, width, heads=1, group=4, before=9, queries=8, device=device)


LONG = [(1000, 300), (32768 + 5, 300), (0, 515)]
"""Tokens before a chunk, and those of it."""


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("before, queries", LONG)
@pytest.mark.parametrize("width, heads, group", [(64, 2, 8), (128, 1, 8), (256, 1, 8), (128, 2, 3)])
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil", "sglang-kv-mx", None])
def test_a_long_chunk_over_a_long_context(name, width, heads, group, before, queries):
    check_chunk(name, width, heads=heads, group=group, before=before, queries=queries, device=torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("config", prefill_configs(), ids=str)
@pytest.mark.parametrize("shape", ATTENTION)
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil", None])
def test_every_tile_of_prefill_that_the_benchmark_times(name, shape, config):
    heads, kv_heads, width = ATTENTION[shape]
    where = {"before": 1000, "queries": 300, "device": torch.device("cuda")}
    check_chunk(name, width, heads=1, group=heads // kv_heads, **where, **config)


def check_chunk(name, width, *, heads, group, before, queries, device, **options):
    """A chunk of one sequence beside a short one, against float64."""
    from tracefp4.kernels.attention_prefill import prefill_attention

    tokens, short = before + queries, min(5, queries)
    kv, _, slots, k, v = filled(name, device, tokens=tokens, heads=heads, width=width)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(queries + short, heads * group, width, generator=generator).bfloat16()
    # The second sequence is the first tokens of the first, all of them new.
    packed = torch.cat([slots, slots[:short]]).to(device)
    table = torch.tensor([[0, queries, 0, tokens], [queries, short, tokens, short]], device=device)
    if device.type == "cpu":
        options = {"rows": 32, "columns": 16}
    q, k, v = (x.to(device) for x in (q, stands_for(k, name), stands_for(v, name)))
    found = prefill_attention(q, kv, packed, table, queries, width**-0.5, **options).double()
    expected = attention(q[:queries], k, v, width**-0.5, before=before)
    assert (found[:queries] - expected).abs().max() < 0.02
    expected = attention(q[queries:], k[:, :short], v[:, :short], width**-0.5)
    assert (found[queries:] - expected).abs().max() < 0.02
