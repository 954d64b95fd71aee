"""Benchmarks of single kernels: codec, fake quantization, attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.evaluation.bench import Bench, Work, need_cuda
from tracefp4.evaluation.fill import fill_kv
from tracefp4.evaluation.rounding_peers import bench_torchao
from tracefp4.formats.blocks import quantize
from tracefp4.formats.fused import rules
from tracefp4.formats.numerics import get_numerics
from tracefp4.guidance.codec import pack_bits, unpack_bits
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.rounding import round_nearest, round_recorded
from tracefp4.kernels.sizes import cdiv
from tracefp4.quantizers.guided import quantize_guided

ATTENTION = {"30b": (32, 4, 128), "35b": (16, 2, 256), "gpt-oss": (64, 8, 64)}
"""Query heads, KV heads, head size."""


def random_values(bench: Bench, rows: int, width: int, seed: int = 0) -> Tensor:
    """``(rows, width)`` bfloat16, normally distributed."""
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
    """Rounding of activations for a product: to nearest, recording a bit, and following recorded bits; torchao's."""
    xs = [random_values(bench, rows, width, seed) for seed in range(2)]
    values = rows * width
    outs = [torch.empty_like(x) for x in xs]
    bench.add("round", "bf16", [lambda o=o, x=x: o.copy_(x) for o, x in zip(outs, xs, strict=True)], 4 * values, "copy")
    for name in ("nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"):
        n = get_numerics(name)
        arm = f"{'fp4' if n.element == 'e2m1' else 'fp8'} {name}"
        moved = values * (4 + 1 / n.block)
        for bits in (0, 1, 4):
            label = f"round r{bits}" if bits else "round"
            works: list[Work] = [lambda x=x, n=n, b=bits: round_nearest(x, n, b).operand for x in xs]
            bench.add(label, arm, works, moved + values * bits / 8)
        q = quantize(xs[0], n)
        for bits, scale_bits in ((1, 8), (1, 3), (4, 8)):
            shape = SiteShape(Site(0, Kind.EXPERTS_IN), 1, width, n.block, n.token_scale)
            g = None if q.global_scale is None else q.global_scale
            record = SiteRecord.pack(shape, q.codes[:, None], q.scales[:, None], g, bits, scale_bits)
            if round_recorded(xs[0], record, n, None, None) is None:
                bench.fail(f"guided r{bits}/s{scale_bits}", arm, f"no kernel on {bench.device}")
                continue
            follow: list[Work] = [lambda x=x, r=record, n=n: round_recorded(x, r, n, None, None) for x in xs]
            moved_guided = values * (4 + bits / 8 + 1 / n.block + scale_bits / 8 / n.block)
            bench.add(f"guided r{bits}/s{scale_bits}", arm, follow, moved_guided)
        outcome = record.outcome()
        eager: list[Work] = [lambda n=n, o=outcome: quantize_guided(xs[0], o, n).operand()]
        bench.add("guided r4/s8", f"tensors {name}", eager, None, "codes by table, not fused")
    bench_torchao(bench, xs)


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
    q = random_values(bench, batch, heads * width).view(batch, heads, width)
    pages = torch.randperm(batch * cdiv(context, page), device=bench.device).view(batch, -1)
    slots = pages.numel() * page
    lengths = torch.full((batch,), context, device=bench.device)
    for arm, numerics in (("bf16", None), ("fp4 nvfp4", "sglang-kv-nvfp4"), ("fp4 mxfp4", "mxfp4-ceil")):
        made = None if numerics is None else rules(get_numerics(numerics))
        kv = replace(pool_tensors(slots, kv_heads, width, made, bench.device), page=page)
        fill_kv(kv, made)
        nbytes = kv.codes.nbytes + (0 if kv.scales is None else kv.scales.nbytes)
        cases = []
        for config in attention_configs():
            text = ", ".join(f"{key} {value}" for key, value in config.items())
            work: Work = lambda kv=kv, c=config: decode_attention(q, kv, pages, lengths, width**-0.5, **c)  # noqa: E731
            cases.append((text, [work]))
        bench.best(name, arm, cases, nbytes)
        del kv, cases
    k, v = (torch.randn(batch, kv_heads, context, width, device=bench.device).to(torch.bfloat16) for _ in range(2))
    dense: Work = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        q[:, :, None], k, v, enable_gqa=True
    )
    bench.add(name, "sdpa", [dense], k.nbytes + v.nbytes)


def attention_configs() -> list[dict[str, Any]]:
    """Arguments of :func:`tracefp4.kernels.attention_decode.decode_attention`."""
    found: list[dict[str, Any]] = [{"span": s, "stages": 5} for s in (64, 128, 256, 512, 1024)]
    found += [{"span": s, "stages": 5, "registers": 120} for s in (512, 1024)]
    return [*found, *({"span": 1024, "stages": s} for s in (2, 7)), {"rows": 64, "warps": 2, "stages": 3}]
