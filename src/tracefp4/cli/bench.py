"""``tracefp4 bench``: speed of kernels and of the embedded engine, beside the bound from bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.console import JsonOption, emit, number
from tracefp4.errors import ConfigError, suggest

CASES = ("codec", "qat", "attention", "experts", "delta", "decode", "prefill", "capture", "rollout", "train", "frames")
"""What can be measured."""
MODELS = ("decode", "prefill", "capture", "rollout")
"""Those that build a model."""


def run(
    case: Annotated[str, typer.Argument(help=f"One of: {', '.join(CASES)}.")],
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; codec, qat, train, frames and tiny shapes run on a CPU.")
    ] = "auto",
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Context length; may be repeated.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Shape of attention, experts or model (30b, 35b, smollm2-moe, tiny, ...); may be repeated."),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Arm of decode (a spec, or transformers) or of train; may be repeated.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="GiB for weights, K, V and states in memory-limited decode; 120, 0 for none.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile decoder layers and sampler, for decode, capture and rollout.")
    ] = False,
    state_dtype: Annotated[
        str, typer.Option(help="What recurrent states of a hybrid shape are kept in, float32 or bfloat16; for decode.")
    ] = "float32",
    skew: Annotated[
        float, typer.Option(help="Skew of routing, for experts: rank r is chosen as 1 / r^skew; 0 for uniform.")
    ] = 0.0,
    rows: Annotated[int, typer.Option(help="Rows of 2048 values, for codec and qat.")] = 16384,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the random model, for decode, prefill, capture and rollout; 8 of 30b.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each case; the median counts.")] = 20,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute layers in the backward pass; for train.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time BF16 and FP4 arms in one run; the bound is the bytes moved over the copy bandwidth of this device."""
    import json

    from tracefp4.evaluation.bench import Bench, pick_device

    if case not in CASES:
        raise ConfigError(f"unknown benchmark {case!r}{suggest(case, CASES)}")
    bench = Bench(pick_device(device), repeats)
    batches, contexts, shapes = tuple(batch or ()), tuple(context or ()), tuple(shape or ())
    if case in MODELS:
        _run_model(bench, case, batches, contexts, shapes, layers, tuple(arm or ()), budget, compiled, state_dtype)
    elif case == "train":
        _train(bench, batches, contexts, shapes, tuple(arm or ()), recompute)
    elif case == "frames":
        _frames(bench, batches, contexts, shapes)
    else:
        _run_kernels(bench, case, batches, contexts, shapes, rows, skew)
    found = bench.to_dict()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    emit(found, as_json=as_json, text=_table(found))


def _run_kernels(
    bench: Any, case: str, batches: tuple[int, ...], contexts: tuple[int, ...], shapes: tuple[str, ...], rows: int,
    skew: float,
) -> None:  # fmt: skip
    from tracefp4.evaluation import bench_delta, bench_kernels

    if case == "delta":
        bench_delta.bench_delta(bench, **({"batches": batches} if batches else {}))
        return
    if case in ("codec", "qat"):
        (bench_kernels.bench_codec if case == "codec" else bench_kernels.bench_qat)(bench, rows)
        return
    known = bench_kernels.ATTENTION if case == "attention" else bench_kernels.EXPERTS
    _check(shapes, known, "shape")
    sizes: dict[str, Any] = {"shapes": shapes or tuple(known)}
    if batches:
        sizes["batches"] = batches
    if case == "attention":
        if contexts:
            sizes["contexts"] = contexts
        bench_kernels.bench_attention(bench, **sizes)
    else:
        bench_kernels.bench_experts(bench, **sizes, skew=skew)


def _run_model(
    bench: Any, case: str, batches: tuple[int, ...], contexts: tuple[int, ...], shapes: tuple[str, ...],
    layers: int | None, arms: tuple[str, ...], budget: float | None,
    compiled: bool, state_dtype: str,
) -> None:  # fmt: skip
    from tracefp4.evaluation import bench_engine, bench_rollout
    from tracefp4.evaluation.bench import need_cuda

    _check(shapes, bench_engine.SHAPES, "shape")
    _check(arms, bench_engine.ARMS, "arm")
    for name in shapes or ("smollm2-moe" if case == "rollout" else "30b",):
        if not name.startswith("tiny"):
            need_cuda(bench, case)
        length = (contexts or ((512,) if name.startswith("tiny") else (8192,)))[0]
        part = bench_engine.slice_of(name, layers, length, compiled, state_dtype)
        if case == "decode":
            bench_engine.bench_decode(bench, part, batches or (1, 16, 64), budget, arms or bench_engine.SPECS)
        elif case == "capture":
            bench_engine.bench_capture(bench, part, (batches or (64,))[0])
        elif case == "prefill":
            part = bench_engine.slice_of(name, layers, (contexts or (4096,))[0])
            bench_engine.bench_prefill(bench, part, (batches or (4,))[0])
        else:
            bench_rollout.bench_rollout(bench, name, layers=layers, compiled=compiled)


def _frames(bench: Any, batches: tuple[int, ...], contexts: tuple[int, ...], shapes: tuple[str, ...]) -> None:
    from tracefp4.evaluation import bench_frames, bench_shapes

    _check(shapes, bench_shapes.SHAPES, "shape")
    for name in shapes or ("smollm2-moe",):
        bench_frames.bench_frames(bench, name, (batches or (64,))[0], (contexts or (130,))[0] - 1)


def _check(names: tuple[str, ...], known: Any, what: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}{suggest(name, tuple(known))}")


def _train(
    bench: Any, batches: tuple[int, ...], contexts: tuple[int, ...], shapes: tuple[str, ...], arms: tuple[str, ...],
    recompute: bool,
) -> None:  # fmt: skip
    from tracefp4.evaluation import bench_train

    _check(shapes, bench_train.SHAPES, "shape")
    _check(arms, bench_train.ARMS, "arm")
    chosen: dict[str, Any] = {"recompute": recompute} | ({"arms": arms} if arms else {})
    if shapes:
        chosen["shapes"] = shapes
    bench_train.bench_train(bench, sequences=(batches or (0,))[0], rows=(contexts or (0,))[0], **chosen)


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
    failed = [f"failed: {line}" for line in found["failures"]]
    top = f"{found['device']}, torch {found['torch']}, copy {found['copy_bandwidth'] / 1e9:.0f} GB/s"
    return "\n".join([top, "", *text, *failed])
