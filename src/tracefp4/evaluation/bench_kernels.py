"""Benchmarks of single kernels: codec, fake quantization, attention, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.evaluation.bench import Bench, Work, need_cuda
from tracefp4.formats.blocks import quantize
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import Numerics, get_numerics
from tracefp4.guidance.codec import pack_bits, unpack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import Rounding, round_gated, round_nearest, round_recorded
from tracefp4.quantizers.guided import quantize_guided

if TYPE_CHECKING:
    from tracefp4.kernels.experts import Config, ExpertWeight
    from tracefp4.kernels.routing import Route

ATTENTION = {"30b": (32, 4, 128), "35b": (16, 2, 256), "gpt-oss": (64, 8, 64)}
"""Query heads, KV heads, head size."""
EXPERTS = {"30b": (128, 8, 2048, 768), "35b": (256, 8, 2048, 512), "smollm2-moe": (8, 2, 576, 1536)}
"""Experts, those of a token, hidden size, intermediate size."""
EXPERT_BATCHES = {"smollm2-moe": (512,)}
"""Batches of a shape, where they are not those of decoding a large model."""


def _random(bench: Bench, rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=bench.device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=bench.device).to(torch.bfloat16)


def bench_codec(bench: Bench, rows: int = 16384, width: int = 2048) -> None:
    """Bit planes of 1 to 4 bits, packed and unpacked."""
    codes = torch.randint(0, 16, (2, rows, width), dtype=torch.uint8, device=bench.device)
    for bits in range(1, 5):
        moved = rows * width * (1 + bits / 8)
        planes = pack_bits(codes, bits)
        bench.add(f"pack r{bits}", "fp4", [lambda i=i, b=bits: pack_bits(codes[i], b) for i in range(2)], moved)
        works: list[Work] = [lambda i=i, b=bits, p=planes: unpack_bits(p[i], b, width) for i in range(2)]
        bench.add(f"unpack r{bits}", "fp4", works, moved)


def bench_qat(bench: Bench, rows: int = 16384, width: int = 2048) -> None:
    """Rounding of activations for a product: to nearest, recording a bit, and following recorded bits."""
    xs = [_random(bench, rows, width, seed) for seed in range(2)]
    values = rows * width
    outs = [torch.empty_like(x) for x in xs]
    bench.add("round", "bf16", [lambda o=o, x=x: o.copy_(x) for o, x in zip(outs, xs, strict=True)], 4 * values, "copy")
    for name in ("nvfp4-te", "nvfp4-pow2", "mxfp4-ceil"):
        n = get_numerics(name)
        moved = values * (4 + 1 / n.block)
        for bits in (0, 1, 4):
            label = f"round r{bits}" if bits else "round"
            works: list[Work] = [lambda x=x, n=n, b=bits: round_nearest(x, n, b).operand for x in xs]
            bench.add(label, f"fp4 {name}", works, moved + values * bits / 8)
        q = quantize(xs[0], n)
        for bits, scale_bits in ((1, 8), (1, 3), (4, 8)):
            shape = SiteShape(Site(0, Kind.EXPERTS_IN), 1, width, n.block, n.token_scale)
            g = None if q.global_scale is None else q.global_scale
            record = SiteRecord.pack(shape, q.codes[:, None], q.scales[:, None], g, bits, scale_bits)
            if round_recorded(xs[0], record, n, None, None) is None:
                bench.failures.append(f"guided r{bits}/s{scale_bits}, fp4 {name}: no kernel on {bench.device}")
                continue
            follow: list[Work] = [lambda x=x, r=record, n=n: round_recorded(x, r, n, None, None) for x in xs]
            moved_guided = values * (4 + bits / 8 + 1 / n.block + scale_bits / 8 / n.block)
            bench.add(f"guided r{bits}/s{scale_bits}", f"fp4 {name}", follow, moved_guided)
        outcome = record.outcome()
        eager: list[Work] = [lambda n=n, o=outcome: quantize_guided(xs[0], o, n).operand()]
        bench.add("guided r4/s8", f"tensors {name}", eager, None, "codes by table, not fused")


def bench_attention(
    bench: Bench,
    shapes: tuple[str, ...] = tuple(ATTENTION),
    batches: tuple[int, ...] = (16, 64),
    contexts: tuple[int, ...] = (8192, 32768),
) -> None:
    """Decode attention over a paged pool, and PyTorch's over dense bfloat16 tensors."""
    need_cuda(bench, "attention")
    for shape in shapes:
        for batch in batches:
            for context in contexts:
                _attention_case(bench, shape, batch, context)


def _attention_case(bench: Bench, shape: str, batch: int, context: int) -> None:
    from tracefp4.kernels.attention_decode import decode_attention
    from tracefp4.kernels.kv_append import pool_tensors

    heads, kv_heads, width = ATTENTION[shape]
    name, page = f"attention {shape} B{batch} {context // 1024}K", 16
    q = _random(bench, batch, heads * width).view(batch, heads, width)
    slots = batch * context
    pages = torch.randperm(slots // page, device=bench.device).view(batch, -1)
    lengths = torch.full((batch,), context, device=bench.device)
    for arm, numerics in (("bf16", None), ("fp4 nvfp4", "sglang-kv-nvfp4"), ("fp4 mxfp4", "mxfp4-ceil")):
        made = None if numerics is None else rules(get_numerics(numerics))
        kv = replace(pool_tensors(slots, kv_heads, width, made, bench.device), page=page)
        _fill(kv.codes, kv.scales, kv.mx)
        nbytes = kv.codes.nbytes + (0 if kv.scales is None else kv.scales.nbytes)
        cases = []
        for span, rows, warps, stages in _attention_configs(width):
            text = f"span {span} rows {rows} warps {warps} stages {stages}"
            work: Work = lambda kv=kv, c=(span, rows, warps, stages): decode_attention(  # noqa: E731
                q, kv, pages, lengths, width**-0.5, span=c[0], rows=c[1], warps=c[2], stages=c[3]
            )
            cases.append((text, [work]))
        bench.best(name, arm, cases, nbytes)
        del kv, cases
    k, v = (torch.randn(batch, kv_heads, context, width, device=bench.device).to(torch.bfloat16) for _ in range(2))
    dense: Work = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        q[:, :, None], k, v, enable_gqa=True
    )
    bench.add(name, "sdpa", [dense], k.nbytes + v.nbytes)


def _attention_configs(width: int) -> list[tuple[int, int, int, int]]:
    """Span, rows, warps, stages."""
    found = [(256, 32, 1, 5), (512, 32, 1, 3), (1024, 32, 1, 2), (1024, 32, 1, 3), (1024, 32, 1, 5), (1024, 64, 2, 3)]
    return found if width == 256 else [*found, (1024, 64, 1, 3)]


def _fill(codes: Tensor, scales: Tensor | None, mx: bool) -> None:
    """Random numbers of ordinary size in place of what a quantizer would store."""
    if scales is None:
        codes.copy_(torch.randn(codes.shape, device=codes.device, dtype=torch.bfloat16))
        return
    codes.view(torch.uint8).random_(0, 256)
    low, high = (124, 130) if mx else (70, 100)
    scales.random_(low, high)


def bench_experts(
    bench: Bench, shapes: tuple[str, ...] = tuple(EXPERTS), batches: tuple[int, ...] = (), skew: float = 0.0
) -> None:
    """The pair gate_up, SiLU times up, down; without routing and the weighted sum, which are measured by themselves.

    Args:
        bench: on a CUDA device.
        shapes: of :data:`EXPERTS`.
        batches: tokens; by default 1 to 256, or those of the shape.
        skew: see :func:`draw_experts`.
    """
    from tracefp4.kernels.experts import tile_rows

    need_cuda(bench, "experts")
    for shape in shapes:
        for arm in ("bf16", "fp4 nvfp4 w4a4", "fp4 nvfp4 w4a16", "fp4 mxfp4 w4a4"):
            layers = [_expert_layer(bench, shape, arm) for _ in range(3)]
            for batch in batches or EXPERT_BATCHES.get(shape, (1, 8, 16, 64, 256)):
                chosen = draw_experts(batch, *EXPERTS[shape][:2], skew, bench.device)
                usual = tile_rows(chosen.numel(), EXPERTS[shape][0])
                for rows in dict.fromkeys((usual, 128 if usual >= 64 else usual)):
                    text = f" skew {skew:g}" * bool(skew) + f" rows {rows}" * (rows != usual)
                    _experts_case(bench, shape, arm, chosen, rows, f"{shape} B{batch}{text}", layers)
            del layers


def draw_experts(batch: int, experts: int, top_k: int, skew: float, device: torch.device) -> Tensor:
    """Experts ``(batch, top_k)`` int64 of random tokens, different ones for each.

    Uniform routing is the kindest: an expert that many tokens choose takes tiles of its own, and the rest of the GPU
    waits for it. With a ``skew`` the expert of rank ``r`` is wanted as ``1 / r^skew``, ranks in random order (Zipf's
    law at 1), without putting one back that a token has chosen.
    """
    generator = torch.Generator(device=device).manual_seed(batch)
    logits = torch.rand(batch, experts, generator=generator, device=device)
    if skew:
        rank = 1 + torch.randperm(experts, generator=generator, device=device)
        # The largest sums of logarithms of weights and Gumbel noise are a draw by weights.
        logits = -(-logits.clamp_min(1e-30).log()).clamp_min(1e-30).log() - skew * rank.log()
    return logits.topk(top_k, -1)[1]


def _expert_layer(bench: Bench, shape: str, arm: str) -> tuple:
    from tracefp4.kernels.experts import ExpertWeight

    experts, _, hidden, inter = EXPERTS[shape]
    made = []
    for out, inner in ((2 * inter, hidden), (hidden, inter)):
        if arm == "bf16":
            values = torch.randn(experts, out, inner, device=bench.device, dtype=torch.bfloat16) * 0.02
            made.append(ExpertWeight(values, None, None, out, inner))
            continue
        mx = "mxfp4" in arm
        words = torch.empty(experts, inner // 64, out, 16, dtype=torch.int16, device=bench.device)
        scales = torch.empty(experts, inner // 64, out, 2 if mx else 4, dtype=torch.uint8, device=bench.device)
        _fill(words, scales, mx)
        alpha = torch.rand(experts, device=bench.device) * 1e-3
        made.append(ExpertWeight(words, scales, alpha, out, inner, mx, 32 if mx else 16))
    return tuple(made)


def _experts_case(
    bench: Bench, shape: str, arm: str, chosen: Tensor, rows: int, case: str, layers: list[tuple]
) -> None:  # fmt: skip
    from tracefp4.kernels.choice import choose
    from tracefp4.kernels.experts import grouped_linear, weighted_sum
    from tracefp4.kernels.gate import gate
    from tracefp4.kernels.routing import route

    experts, top_k, hidden, inter = EXPERTS[shape]
    batch = len(chosen)
    pairs, name = route(chosen, experts, rows), f"experts {case}"
    x, gated = _random(bench, batch, hidden), _random(bench, batch * top_k, inter, 1)
    n = None if "w4a4" not in arm else get_numerics("mxfp4-ceil" if "mxfp4" in arm else "nvfp4-te")
    hit = chosen.unique().numel() / experts

    best = [
        _best_tile(
            bench, f"{name} {('gate_up', 'down')[p]}", arm, [layer[p] for layer in layers], v, pairs, p, n,
            _expert_configs(arm, batch, rows, v.shape[1]),
        )
        for p, v in enumerate((x, gated))
    ]  # fmt: skip

    def pair(layer: tuple, configs: Sequence[Config | None]) -> Tensor:
        value, scale = (x, None) if n is None else _operand(round_nearest(x, n))
        up = grouped_linear(value, scale, layer[0], pairs, per_token=True, config=configs[0])
        fused = None if n is None else round_gated(up, n)
        if fused is None:
            value, scale = gate(up), None
        else:
            value, scale = _operand(fused)
        return grouped_linear(value, scale, layer[1], pairs, per_token=False, config=configs[1])

    nbytes = hit * sum(_nbytes(w) for w in layers[0])
    both = (("default tiles", [None, None]), ("best tiles", best))
    bench.best(
        name, arm, [(text, [lambda w=layer, c=c: pair(w, c) for layer in layers]) for text, c in both], nbytes
    )  # fmt: skip
    if n is not None:
        up = _random(bench, batch * top_k, 2 * inter, 2)
        bench.add(f"{name} round x", arm, [lambda: round_nearest(x, n)], None)
        bench.add(f"{name} gate and round", arm, [lambda: round_gated(up, n)], None)
    if arm == "bf16":
        logits = torch.rand(batch, experts, device=bench.device)
        kept, slots = chosen.to(torch.uint8), torch.arange(batch, device=bench.device)
        choice: Work = lambda: choose(  # noqa: E731
            logits, top_k, renormalise=True, dtype=torch.bfloat16, routes=kept, slots=slots
        )
        bench.add(f"choice {case}", "bf16", [choice], None)
        bench.add(f"route {case}", "bf16", [lambda: route(chosen, experts, rows)], None)
        out, gates = torch.zeros(batch * top_k, hidden, device=x.device).to(x.dtype), torch.rand(chosen.shape).to(x)
        bench.add(f"weighted sum {case}", "bf16", [lambda: weighted_sum(out, gates)], out.nbytes)


def _best_tile(
    bench: Bench, name: str, arm: str, weights: list[ExpertWeight], value: Tensor, pairs: Route, part: int,
    numerics: Numerics | None, configs: list[Config],
) -> Config | None:  # fmt: skip
    """One projection by itself. Tiles differ in speed alone, so the best of each projection make the best pair."""
    from tracefp4.kernels.experts import grouped_linear

    scale = None if numerics is None else torch.ones(value.shape[0], 1, device=value.device)
    used = pairs.tiles[pairs.tiles[:, 2] > pairs.tiles[:, 1]]
    hit = used[:, 0].unique().numel() / weights[0].values.shape[0]
    cases: dict[str, Config | None] = {_text(config): config for config in (None, *configs)}
    works: list[tuple[str, list[Work]]] = [
        (
            text,
            [lambda w=w, c=c: grouped_linear(value, scale, w, pairs, per_token=part == 0, config=c) for w in weights],
        )
        for text, c in cases.items()
    ]
    return cases[bench.best(name, arm, works, hit * _nbytes(weights[0])) or "default"]


def _nbytes(weight: ExpertWeight) -> int:
    return weight.values.nbytes + (0 if weight.scales is None else weight.scales.nbytes)


def _operand(rounded: Rounding) -> tuple[Tensor, Tensor | None]:
    return rounded.factor(), rounded.decode_scale()


def _text(config: Config | None) -> str:
    if config is None:
        return "default"
    return f"columns {config.columns} unroll {config.unroll} warps {config.warps} stages {config.stages}"


def _expert_configs(arm: str, batch: int, rows: int, inner: int) -> list[Config]:
    """Tiles worth measuring beside the default; ``benchmarks/instructions.py`` counts what each costs."""
    from tracefp4.kernels.experts import Config

    if rows >= 32:
        sizes = [(128, 1, 4, 4), (128, 1, 4, 3), (64, 1, 4, 4), (64, 1, 4, 3), (128, 1, 8, 3)]
        if arm != "bf16":
            sizes += [(128, 2, 4, 3), (64, 2, 4, 3), (128, 1, 2, 3), (256, 1, 4, 3)]
    elif arm == "bf16":
        sizes = [(16, 4, 1, 4), (32, 4, 1, 3)] if batch <= 4 else [(128, 1, 4, 4), (64, 1, 2, 4), (64, 2, 4, 4)]
    elif batch <= 4:
        sizes = [(16, 4, 1, 4), (16, 4, 1, 3), (32, 2, 1, 4), (32, 4, 1, 2), (16, 2, 1, 6)]
    elif "nvfp4 w4a4" in arm:
        sizes = [
            (64, 1, 1, 3), (64, 1, 1, 4), (64, 2, 1, 3), (64, 4, 1, 2), (32, 4, 1, 2), (32, 2, 1, 4),
            (128, 1, 2, 4), (128, 1, 1, 4), (256, 1, 4, 3), (128, 2, 4, 3),
        ]  # fmt: skip
    else:
        sizes = [(64, 1, 1, 4), (64, 2, 1, 3), (32, 4, 1, 2), (128, 1, 2, 4), (128, 2, 4, 3)]
    # A step takes whole chunks of a row.
    return [Config(*size) for size in sizes if inner % (64 * size[1]) == 0]
