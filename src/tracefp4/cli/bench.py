"""``tracefp4 bench``: speed of kernels and of the embedded engine, beside the bound from bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.console import JsonOption, emit, number
from tracefp4.errors import ConfigError, suggest

CASES = ("codec", "qat", "attention", "experts", "decode", "prefill", "capture")
"""What can be measured."""


def run(
    case: Annotated[str, typer.Argument(help=f"One of: {', '.join(CASES)}.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; only codec and qat run on a CPU.")] = "auto",
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Context length; may be repeated.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shape of attention or experts; may be repeated.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of 2048 values, for codec and qat.")] = 16384,
    layers: Annotated[int, typer.Option(help="Layers of the random model, for decode, prefill and capture.")] = 8,
    repeats: Annotated[int, typer.Option(help="Runs of each case; the median counts.")] = 20,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time BF16 and FP4 arms in one run; the bound is the bytes moved over the copy bandwidth of this device."""
    import json

    from tracefp4.evaluation.bench import Bench, pick_device

    if case not in CASES:
        raise ConfigError(f"unknown benchmark {case!r}{suggest(case, CASES)}")
    bench = Bench(pick_device(device), repeats)
    _run(bench, case, tuple(batch or ()), tuple(context or ()), tuple(shape or ()), rows, layers)
    found = bench.to_dict()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    emit(found, as_json=as_json, text=_table(found))


def _run(
    bench: Any, case: str, batches: tuple[int, ...], contexts: tuple[int, ...], shapes: tuple[str, ...], rows: int,
    layers: int,
) -> None:  # fmt: skip
    from tracefp4.evaluation import bench_engine, bench_kernels

    if case in ("codec", "qat"):
        (bench_kernels.bench_codec if case == "codec" else bench_kernels.bench_qat)(bench, rows)
    elif case in ("attention", "experts"):
        known = bench_kernels.ATTENTION if case == "attention" else bench_kernels.EXPERTS
        for name in shapes:
            if name not in known:
                raise ConfigError(f"unknown shape {name!r}{suggest(name, known)}")
        sizes: dict[str, Any] = {"shapes": shapes or tuple(known)}
        if batches:
            sizes["batches"] = batches
        if case == "attention":
            if contexts:
                sizes["contexts"] = contexts
            bench_kernels.bench_attention(bench, **sizes)
        else:
            bench_kernels.bench_experts(bench, **sizes)
    else:
        model = bench_engine.Shape(layers=layers)
        if case == "decode":
            bench_engine.bench_decode(bench, batches or (1, 16, 64), (contexts or (8192,))[0], model)
        elif case == "capture":
            bench_engine.bench_capture(bench, (batches or (64,))[0], (contexts or (8192,))[0], model)
        else:
            bench_engine.bench_prefill(bench, (batches or (4,))[0], (contexts or (4096,))[0], model)


def _table(found: dict[str, Any]) -> str:
    head = ["case", "arm", "value", "unit", "bound", "of bound", "x bf16", "configuration"]
    lines = [head]
    for row in found["rows"]:
        share = None if row["bound"] is None else row["bound"] / row["value"]
        cells = [row["name"], row["arm"], number(row["value"]), row["unit"], number(row["bound"]), number(share)]
        lines.append([*cells, number(row["ratio_to_bf16"]), row["detail"]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    failed = [f"failed: {line}" for line in found["failures"]]
    top = f"{found['device']}, torch {found['torch']}, copy {found['copy_bandwidth'] / 1e9:.0f} GB/s"
    return "\n".join([top, "", *text, *failed])
