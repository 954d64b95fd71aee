"""``tracefp4 bench``: speed of kernels and of the embedded engine, beside the bound from bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.bench_options import CASES, Wanted, check_case, check_names
from tracefp4.cli.console import JsonOption, emit, number, stderr_console

MODELS = ("decode", "prefill", "capture", "rollout")
"""Cases that build a model."""
SMALL_CONTEXT = 256
"""Tokens of a context of the tiny shapes, which have positions for 512."""


def run(
    ctx: typer.Context,
    case: Annotated[str, typer.Argument(help=f"One of: {', '.join(CASES)}.")],
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; codec, qat, train, frames and tiny shapes run on a CPU.")
    ] = "auto",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size; may be repeated, also with contexts: all pairs.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Context length; may be repeated.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Shape of attention, experts or model (30b, 35b, smollm2-moe, tiny, ...); may be repeated."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Arm of decode or prefill (a spec, transformers), experts, train, plan of capture; may be repeated."
        ),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="GiB for weights, K, V and states in memory-limited decode; 120, 0 for none.")
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile decoder layers and sampler, for decode, capture and rollout; the peer of prefill.",
        ),
    ] = False,
    state_dtype: Annotated[
        str, typer.Option(help="What recurrent states are kept in, float32 or bfloat16; for decode and capture.")
    ] = "float32",
    skew: Annotated[
        float, typer.Option(help="Skew of routing, for experts: rank r is chosen as 1 / r^skew; 0 for uniform.")
    ] = 0.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Time the default tiles of experts alone, and no others beside them.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows of 2048 values, for codec and qat.")] = 16384,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers of the random model, for decode, prefill, capture and rollout; 8 of 30b."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case; the median counts.")] = 20,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute layers in the backward pass; for train.")
    ] = False,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompt tokens of a forward pass, for prefill (8192); attention of so many new tokens each."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time BF16 and FP4 arms in one run; the bound is the bytes moved over the copy bandwidth of this device."""
    check_case(case, _given(ctx))
    wanted = Wanted(
        case, tuple(batch or ()), tuple(context or ()), tuple(shape or ()), tuple(arm or ()), budget, compiled,
        state_dtype, skew, quick, rows, layers, recompute, chunk,
    )  # fmt: skip
    found = _measure(wanted, device, repeats, output)
    emit(found, as_json=as_json, text=_table(found))


def _given(ctx: typer.Context) -> list[str]:
    """Options that stand on the command line, without dashes."""
    found = []
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            found.append(parameter.opts[0].removeprefix("--"))
    return found


def _measure(wanted: Wanted, device: str, repeats: int, output: Path | None) -> dict[str, Any]:
    """Run one case; its rows come out on standard error, and stand in ``output``, as soon as they are measured."""
    from tracefp4.evaluation.bench import Bench, pick_device

    console = stderr_console()
    bench = Bench(pick_device(device), repeats, show=lambda line: console.print(line, markup=False, soft_wrap=True))
    if output is not None:
        bench.grown = lambda: _write(output, bench.to_dict(finished=False))
    if wanted.case in MODELS:
        _run_model(bench, wanted)
    elif wanted.case == "train":
        _train(bench, wanted)
    elif wanted.case == "frames":
        _frames(bench, wanted)
    else:
        _run_kernels(bench, wanted)
    found = bench.to_dict()
    if output is not None:
        _write(output, found)
    return found


def _write(output: Path, found: dict[str, Any]) -> None:
    import json

    from tracefp4.report.run_report import write_text

    write_text(output, json.dumps(found, indent=1) + "\n")


def _run_kernels(bench: Any, wanted: Wanted) -> None:
    from tracefp4.evaluation import bench_delta, bench_experts, bench_kernels, bench_prefill

    case = wanted.case
    if case == "delta":
        bench_delta.bench_delta(bench, **({"batches": wanted.batches} if wanted.batches else {}))
        return
    if case in ("codec", "qat"):
        (bench_kernels.bench_codec if case == "codec" else bench_kernels.bench_qat)(bench, wanted.rows)
        return
    known = bench_kernels.ATTENTION if case == "attention" else bench_experts.EXPERTS
    check_names(wanted.shapes, known, "shape")
    sizes: dict[str, Any] = {"shapes": wanted.shapes or tuple(known)}
    if wanted.batches:
        sizes["batches"] = wanted.batches
    if case == "attention":
        if wanted.contexts:
            sizes["contexts"] = wanted.contexts
        if wanted.chunk is None:
            bench_kernels.bench_attention(bench, **sizes)
        else:
            bench_prefill.bench_prefill_attention(bench, **sizes, chunk=wanted.chunk)
        return
    check_names(wanted.arms, bench_experts.ARMS, "arm")
    arms = wanted.arms or bench_experts.ARMS
    bench_experts.bench_experts(bench, **sizes, skew=wanted.skew, arms=arms, quick=wanted.quick)


def _run_model(bench: Any, wanted: Wanted) -> None:
    from tracefp4.evaluation import bench_engine
    from tracefp4.evaluation.bench import need_cuda

    check_names(wanted.shapes, bench_engine.SHAPES, "shape")
    names = wanted.shapes or ("smollm2-moe" if wanted.case == "rollout" else "30b",)
    for name in names:
        if not name.startswith("tiny"):
            need_cuda(bench, wanted.case)
    {"decode": _decode, "prefill": _prefill, "capture": _capture, "rollout": _rollout}[wanted.case](
        bench, wanted, names
    )


def _decode(bench: Any, wanted: Wanted, names: tuple[str, ...]) -> None:
    from tracefp4.evaluation import bench_engine

    check_names(wanted.arms, bench_engine.ARMS, "arm")
    for name in names:
        for context in wanted.contexts or (_context(name, 8192),):
            part = bench_engine.slice_of(name, wanted.layers, context, wanted.compiled, wanted.state_dtype)
            batches, arms = wanted.batches or (1, 16, 64), wanted.arms or bench_engine.SPECS
            bench_engine.bench_decode(bench, part, batches, wanted.budget, arms)


def _capture(bench: Any, wanted: Wanted, names: tuple[str, ...]) -> None:
    from tracefp4.evaluation import bench_engine
    from tracefp4.evaluation.bench_capture import bench_capture

    for name in names:
        for batch, context in wanted.sweep(64, _context(name, 8192)):
            part = bench_engine.slice_of(name, wanted.layers, context, wanted.compiled, wanted.state_dtype)
            bench_capture(bench, part, batch, wanted.arms)


def _prefill(bench: Any, wanted: Wanted, names: tuple[str, ...]) -> None:
    from tracefp4.evaluation import bench_engine, bench_prefill

    check_names(wanted.arms, bench_prefill.ARMS, "arm")
    for name in names:
        for context in wanted.contexts or ((SMALL_CONTEXT,) if name.startswith("tiny") else (2048, 8192)):
            part = bench_engine.slice_of(name, wanted.layers, context, wanted.compiled)
            for batch in wanted.batches or (4,):
                bench_prefill.bench_prefill(
                    bench, part, batch, wanted.chunk or bench_prefill.CHUNK, wanted.arms or bench_prefill.ARMS
                )


def _rollout(bench: Any, wanted: Wanted, names: tuple[str, ...]) -> None:
    from tracefp4.evaluation.bench_rollout import bench_rollout

    for name in names:
        bench_rollout(bench, name, layers=wanted.layers, compiled=wanted.compiled)


def _context(name: str, usual: int) -> int:
    """Length of context of a shape by default."""
    return SMALL_CONTEXT if name.startswith("tiny") else usual


def _frames(bench: Any, wanted: Wanted) -> None:
    from tracefp4.evaluation import bench_frames, bench_shapes

    check_names(wanted.shapes, bench_shapes.SHAPES, "shape")
    for name in wanted.shapes or ("smollm2-moe",):
        for batch, context in wanted.sweep(64, 130):
            bench_frames.bench_frames(bench, name, batch, context - 1)


def _train(bench: Any, wanted: Wanted) -> None:
    from tracefp4.evaluation import bench_train

    check_names(wanted.shapes, bench_train.SHAPES, "shape")
    check_names(wanted.arms, bench_train.ARMS, "arm")
    chosen: dict[str, Any] = {"recompute": wanted.recompute} | ({"arms": wanted.arms} if wanted.arms else {})
    if wanted.shapes:
        chosen["shapes"] = wanted.shapes
    for sequences, rows in wanted.sweep(0, 0):
        bench_train.bench_train(bench, sequences=sequences, rows=rows, **chosen)


def _table(found: dict[str, Any]) -> str:
    head = ["case", "arm", "value", "unit", "bound", "of bound", "x bf16", "configuration"]
    lines = [head]
    for row in found["rows"]:
        share = None if row["bound"] is None else row["bound"] / row["value"]
        if share is not None and row["unit"].endswith("/s"):
            share = 1 / share
        cells = [row["name"], row["arm"], number(row["value"]), row["unit"], number(row["bound"]), number(share)]
        lines.append([*cells, number(row["ratio_to_bf16"]), row["detail"]])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    failed = [f"failed: {line}" for line in found["failures"]] + [f"note: {line}" for line in found["notes"]]
    top = f"{found['device']}, torch {found['torch']}, copy {found['copy_bandwidth'] / 1e9:.0f} GB/s"
    return "\n".join([top, "", *text, *failed])
