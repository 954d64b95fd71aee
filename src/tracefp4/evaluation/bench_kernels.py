"""Benchmarks of single kernels: codec, fake quantization, attention, experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.evaluation.bench import Bench, Work, need_cuda
from tracefp4.formats.blocks import quantize
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import get_numerics
from tracefp4.guidance.codec import pack_bits, unpack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import round_nearest, round_recorded
from tracefp4.quantizers.guided import quantize_guided

ATTENTION = {"30b": (32, 4, 128), "35b": (16, 2, 256), "gpt-oss": (64, 8, 64)}
"""Query heads, KV heads, head size."""
EXPERTS = {"30b": (128, 2048, 768), "35b": (256, 2048, 512)}
"""Experts, hidden size, intermediate size; top 8."""
TOP_K = 8


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
    bench: Bench, shapes: tuple[str, ...] = tuple(EXPERTS), batches: tuple[int, ...] = (1, 8, 16, 64, 256)
) -> None:
    """The pair gate_up, SiLU times up, down; without routing and the weighted sum, which are measured by themselves."""
    need_cuda(bench, "experts")
    for shape in shapes:
        for arm in ("bf16", "fp4 nvfp4 w4a4", "fp4 nvfp4 w4a16", "fp4 mxfp4 w4a4"):
            layers = [_expert_layer(bench, shape, arm) for _ in range(3)]
            for batch in batches:
                _experts_case(bench, shape, arm, batch, layers)
            del layers


def _expert_layer(bench: Bench, shape: str, arm: str) -> tuple:
    from tracefp4.kernels.experts import ExpertWeight

    experts, hidden, inter = EXPERTS[shape]
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
        alpha = None if mx else torch.rand(experts, device=bench.device) * 1e-3
        made.append(ExpertWeight(words, scales, alpha, out, inner, mx, 32 if mx else 16))
    return tuple(made)


def _experts_case(bench: Bench, shape: str, arm: str, batch: int, layers: list[tuple]) -> None:
    from tracefp4.kernels.experts import grouped_linear, tile_rows, weighted_sum
    from tracefp4.kernels.routing import route

    experts, hidden, _ = EXPERTS[shape]
    generator = torch.Generator(device=bench.device).manual_seed(batch)
    chosen = torch.rand(batch, experts, generator=generator, device=bench.device).topk(TOP_K, -1)[1]
    rows = tile_rows(batch * TOP_K, experts)
    pairs, name = route(chosen, experts, rows), f"experts {shape} B{batch}"
    x = _random(bench, batch, hidden)
    n = None if "w4a4" not in arm else get_numerics("mxfp4-ceil" if "mxfp4" in arm else "nvfp4-te")
    hit = chosen.unique().numel()
    nbytes = hit / experts * sum(
        w.values.nbytes + (0 if w.scales is None else w.scales.nbytes) for w in layers[0]
    )  # fmt: skip

    def pair(layer: tuple, config: object) -> Tensor:
        value, scale = x, None
        if n is not None:
            value, scale = _operand(x, n)
        up = grouped_linear(value, scale, layer[0], pairs, per_token=True, config=config)  # type: ignore[arg-type]
        gate, other = up.chunk(2, -1)
        value, scale = torch.nn.functional.silu(gate) * other, None
        if n is not None:
            value, scale = _operand(value, n)
        return grouped_linear(value, scale, layer[1], pairs, per_token=False, config=config)  # type: ignore[arg-type]

    cases = []
    for config in _expert_configs(arm):
        works: list[Work] = [lambda layer=layer, c=config: pair(layer, c) for layer in layers]
        cases.append((f"columns {config.columns} unroll {config.unroll} warps {config.warps}", works))
    bench.best(name, arm, cases, nbytes)
    if arm == "bf16":
        bench.add(f"route {shape} B{batch}", "bf16", [lambda: route(chosen, experts, rows)], None)
        out, gates = torch.zeros(batch * TOP_K, hidden, device=x.device).to(x.dtype), torch.rand(chosen.shape).to(x)
        bench.add(f"weighted sum {shape} B{batch}", "bf16", [lambda: weighted_sum(out, gates)], out.nbytes)


def _operand(x: Tensor, n: object) -> tuple[Tensor, Tensor | None]:
    rounded = round_nearest(x, n)  # type: ignore[arg-type]
    if rounded.operand is None:
        raise RuntimeError("rounded without an operand")
    return rounded.operand, rounded.decode_scale()


def _expert_configs(arm: str) -> list:
    from tracefp4.kernels.experts import Config

    if arm == "bf16":
        return [Config(128, 1, 4, 4), Config(64, 2, 4, 4)]
    if "nvfp4 w4a4" in arm:
        return [Config(128, 2, 4, 3), Config(256, 1, 4, 3), Config(64, 2, 2, 4), Config(64, 2, 4, 4)]
    return [Config(128, 2, 4, 3), Config(64, 2, 2, 4)]
