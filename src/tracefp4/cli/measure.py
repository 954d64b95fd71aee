"""``tracefp4 measure``: the gap of rollout and trainer on a model, and what each plan of guidance would change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.console import JsonOption, emit, number, stderr_console

if TYPE_CHECKING:
    from tracefp4.evaluation.rows import Measurement, Row


def run(
    model: Annotated[
        str, typer.Argument(help="Model name or path: smollm2-moe, tiny-moe, a folder, a run, a hub name.")
    ],
    spec: Annotated[str, typer.Option(help="Deployment that is measured; /bN: N layers in BF16.")] = "nvfp4-w4a4-kv4",
    numerics: Annotated[str, typer.Option(help="Arithmetic of the FP4 formats.")] = "nvfp4-te",
    plan: Annotated[
        list[str] | None, typer.Option(help="Plan, plan@decoder or auto:BYTES; may be repeated. Default: all.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts.")] = 64,
    samples: Annotated[int, typer.Option(help="Samples a prompt.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(help="Response length limit.")] = 96,
    max_batch: Annotated[int, typer.Option(help="Sequences decoded at once; large batches hide the gap.")] = 16,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    task: Annotated[Path | None, typer.Option(help="Config file whose task gives the prompts.")] = None,
    own_routes: Annotated[bool, typer.Option(help="Also measure without route replay.")] = False,
    micro_tokens: Annotated[int, typer.Option(help="Padded tokens a trainer forward.")] = 8192,
    engine: Annotated[str, typer.Option(help="Rollout engine: embedded, or an installed one.")] = "embedded",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Prompts and sampling.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure log-prob gaps, code flips and scale mismatches of two paths; nothing is trained."""
    import json

    from tracefp4.evaluation.measure import MeasureSettings, measure

    console = stderr_console()
    found = measure(
        MeasureSettings(
            model=model,
            spec=spec,
            numerics=numerics,
            plans=tuple(plan or ()),
            prompts=prompts,
            samples=samples,
            max_new_tokens=max_new_tokens,
            max_batch=max_batch,
            temperature=temperature,
            task=None if task is None else str(task),
            own_routes=own_routes,
            micro_tokens=micro_tokens,
            engine=engine,
            device=device,
            seed=seed,
        ),
        note=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    emit(found.to_dict(), as_json=as_json, text=_table(found))


def _plan(row: Row) -> str:
    """A row's plan, and how many layers it leaves in BF16."""
    return (row.plan or "") + (f" (BF16: {row.bf16_layers})" if row.bf16_layers else "")


def _table(found: Measurement) -> str:
    head = f"{found.model}, {found.spec} ({found.numerics}) on {found.device}, engine {found.engine}"
    head += f": {found.tokens} response tokens, {found.prompts} prompts"
    columns = [
        "trainer",
        "plan",
        "decoder",
        "routes",
        "k3 KL",
        "95 % interval",
        "mean |d|",
        "max",
        "min",
        "wrong codes",
        "B/token",
    ]
    lines = [
        [
            row.name,
            _plan(row),
            row.decoder or "",
            "replayed" if row.route_replay else "own",
            number(row.k3),
            f"{number(row.k3_ci[0])} .. {number(row.k3_ci[1])}",
            number(row.mean_abs),
            number(row.max),
            number(row.min),
            number(row.wrong_code_rate),
            number(row.bytes_per_token),
        ]
        for row in found.rows
    ]
    widths = [max(len(line[i]) for line in [columns, *lines]) for i in range(len(columns))]
    return "\n".join(
        [head, ""] + ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [columns, *lines]]
    )
