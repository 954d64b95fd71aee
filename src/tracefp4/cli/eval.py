"""``tracefp4 eval``: pass@k of a policy as it is deployed, in FP4 or BF16, never guided."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.console import JsonOption, emit, number


def run(
    model: Annotated[str, typer.Argument(help="Model name or path, or the folder of a run (its newest checkpoint).")],
    config: Annotated[Path | None, typer.Option(help="Config whose task is evaluated; a run's own by default.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, as a.b=value; may be repeated.")] = None,
    spec: Annotated[str | None, typer.Option(help="Deployment; bf16 evaluates without quantization.")] = None,
    items: Annotated[int, typer.Option(help="Held-out items.")] = 128,
    samples: Annotated[int, typer.Option(help="Samples an item; at least the largest k.")] = 4,
    k: Annotated[list[int] | None, typer.Option(help="k of pass@k; may be repeated.")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    threshold: Annotated[float, typer.Option(help="A score of at least this counts as solved.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate pass@k on held-out items with a confidence interval."""
    import json

    from tracefp4.evaluation.policy import EvalSettings, evaluate_policy

    found = evaluate_policy(
        EvalSettings(
            model=model,
            config=config,
            overrides=tuple(set_ or ()),
            spec=spec,
            items=items,
            samples=samples,
            ks=tuple(k or (1,)),
            temperature=temperature,
            threshold=threshold,
            device=device,
            seed=seed,
        )
    )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    emit(found, as_json=as_json, text=_text(found))


def _text(found: dict[str, Any]) -> str:
    lines = [
        f"{found['model']}, {found['spec']}, task {found['task']}: {found['items']} items x {found['samples']} samples"
    ]
    lines += [
        f"  {name}: {number(row['estimate'])}  [{number(row['low'])}, {number(row['high'])}]"
        for name, row in found["pass"].items()
    ]
    score = found["score"]
    lines += [f"  mean score: {number(score['estimate'])}  [{number(score['low'])}, {number(score['high'])}]"]
    return "\n".join(lines)
