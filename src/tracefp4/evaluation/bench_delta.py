"""Benchmark of a step of gated delta nets: convolution and delta rule in rows of a state pool.

Sizes are those of Qwen3.5-35B-A3B. Steps follow each other in rows of their own, so that no state is in the
second-level cache when it is wanted.
"""

from __future__ import annotations

import torch

from tracefp4.evaluation.bench import Bench, Work, need_cuda
from tracefp4.evaluation.fill import STATE
from tracefp4.models.recurrence import convolve
from tracefp4.rollout.state import STATE_DTYPES

KEY_HEADS, HEADS, WIDTH, TAPS = 16, 32, 128, 4
"""Key heads, value heads, width of both, inputs of the convolution."""
ROWS = 96
"""Rows of the pool: 192 MiB in float32."""


def bench_delta(bench: Bench, batches: tuple[int, ...] = (1, 16, 64)) -> None:
    """Both kernels, and programs of several widths of the second, for float32 and bfloat16 states.

    Raises:
        ConfigError: the device is no GPU.
    """
    need_cuda(bench, "delta")
    for batch in batches:
        _convolution(bench, batch)
        for name, dtype in STATE_DTYPES.items():
            _rule(bench, batch, name, dtype)


def _rows(bench: Bench, batch: int) -> list[torch.Tensor]:
    rows = torch.randperm(max(ROWS, batch), device=bench.device)
    return list(rows[: len(rows) // batch * batch].view(-1, batch))


def _convolution(bench: Bench, batch: int) -> None:
    channels = (2 * KEY_HEADS + HEADS) * WIDTH
    x = torch.randn(batch, channels, device=bench.device).to(torch.bfloat16)
    weight = torch.randn(channels, TAPS, device=bench.device).to(torch.bfloat16)
    pool = torch.randn(max(ROWS, batch), TAPS, channels, dtype=torch.bfloat16, device=bench.device)
    works: list[Work] = [lambda r=rows: convolve(x, pool, r, weight) for rows in _rows(bench, batch)]
    # Three taps are read and four written; input and output.
    moved = batch * channels * 2.0 * (2 * TAPS - 1 + 2) + weight.nbytes
    bench.add(f"short convolution B{batch}", "bf16", works, moved)


def _rule(bench: Bench, batch: int, name: str, dtype: torch.dtype) -> None:
    from tracefp4.kernels.delta_rule import step

    mixed = torch.randn(batch, (2 * KEY_HEADS + HEADS) * WIDTH, device=bench.device).to(torch.bfloat16)
    a, b = (torch.randn(batch, HEADS, device=bench.device).to(torch.bfloat16) for _ in range(2))
    log_rate, dt_bias = (torch.randn(HEADS, device=bench.device).to(torch.bfloat16) for _ in range(2))
    pool = STATE * torch.randn(max(ROWS, batch), HEADS, WIDTH, WIDTH, dtype=dtype, device=bench.device)
    moved = 2.0 * batch * pool[0].nbytes + mixed.nbytes + batch * HEADS * WIDTH * 2
    cases = []
    for tile, warps in ((8, 1), (16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (128, 8)):
        works: list[Work] = [
            lambda r=rows, t=tile, w=warps: step(mixed, a, b, log_rate, dt_bias, pool, r, tile=t, warps=w)
            for rows in _rows(bench, batch)
        ]
        cases.append((f"{tile} columns, {warps} warps", works))
    bench.best(f"delta rule B{batch}", f"states {name}", cases, moved)
