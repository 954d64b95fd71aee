"""``tracefp4 quantize``: FP4 weights for a finished policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.console import JsonOption, emit, number, stderr_console


def run(
    model: Annotated[str, typer.Argument(help="Model name or path, or the folder of a run (its newest checkpoint).")],
    output: Annotated[Path, typer.Option(help="Folder to write; must not exist yet, or be empty.")],
    method: Annotated[
        str, typer.Option(help="nvfp4, 4over6-mse, 4over6-mae, 4over6-absmax or hscale (needs a task).")
    ] = "nvfp4",
    spec: Annotated[
        str, typer.Option(help="Deployment that the weights are for; layers in BF16 are a run's own.")
    ] = "nvfp4-w4a4-kv4",
    numerics: Annotated[str, typer.Option(help="Arithmetic of the FP4 formats.")] = "nvfp4-te",
    config: Annotated[
        Path | None, typer.Option(help="Config whose task gives calibration prompts; a run's own by default.")
    ] = None,
    calibrate: Annotated[bool, typer.Option(help="Calibrate for any method: weighted errors, input scales.")] = False,
    layout: Annotated[
        str, typer.Option(help="packed (for this package) or compressed-tensors (for vLLM and SGLang).")
    ] = "packed",
    prompts: Annotated[int, typer.Option(help="Calibration prompts; the policy answers each once.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seeds calibration, and random models.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Quantize the expert weights of a policy after training, and write a folder that the other commands load."""
    from tracefp4.export.run import QuantizeSettings, quantize

    console = stderr_console()
    found = quantize(
        QuantizeSettings(model, output, method, spec, numerics, config, calibrate, layout, prompts, device, seed),
        note=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    emit(found, as_json=as_json, text=_text(found))


def _text(found: dict[str, Any]) -> str:
    errors = found["errors"]
    stored = f", activations {found['activations']}" if "activations" in found else ""
    lines = [f"{found['model']} by {found['method']}: {len(found['rows'])} expert weights in {found['output']}{stored}"]
    lines += [f"  relative error {number(errors['error'])} (nvfp4: {number(errors['error_nearest'])})"]
    if "weighted" in errors:
        plain = number(errors["weighted_nearest"])
        lines += [f"  weighted by input energy {number(errors['weighted'])} (nvfp4: {plain})"]
    shares = " / ".join(f"{errors[f'scales_{name}']:.1%}" for name in ("unchanged", "larger", "smaller"))
    lines += [f"  block scales unchanged / larger / smaller: {shares}"]
    return "\n".join(lines)
