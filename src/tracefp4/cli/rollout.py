"""``tracefp4 rollout``: generate from prompts with the engine, and say what its guidance weighs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tracefp4.cli.console import JsonOption, emit
from tracefp4.errors import ConfigError


def run(
    model: Annotated[str, typer.Argument(help="Model name or path, or the folder of a run.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt text; may be repeated.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File with one prompt a line.")] = None,
    spec: Annotated[str, typer.Option(help="Deployment.")] = "nvfp4-w4a4-kv4",
    numerics: Annotated[str, typer.Option(help="Arithmetic of the FP4 formats.")] = "nvfp4-te",
    plan: Annotated[
        str,
        typer.Option(help="Guidance to record; none records nothing, auto all that the spec quantizes, in one bit."),
    ] = "auto",
    samples: Annotated[int, typer.Option(help="Samples a prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Response length limit.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    plain: Annotated[bool, typer.Option(help="Do not apply the chat template.")] = False,
    guidance_dir: Annotated[Path | None, typer.Option(help="Keep guidance frames in this folder.")] = None,
    profile: Annotated[
        bool, typer.Option(help="Say where the time goes: forward, KV dequantization, guidance. Slower.")
    ] = False,
    engine: Annotated[str, typer.Option(help="Rollout engine: embedded, or an installed one.")] = "embedded",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Generate with FP4 experts, activations and KV cache, recording guidance."""
    from tracefp4.core import SamplingParams
    from tracefp4.evaluation.generate import GenerateSettings, generate

    texts = list(prompt or [])
    if prompts is not None:
        try:
            texts += [line for line in prompts.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt file {str(prompts)!r} cannot be read: {error}") from error
    if not texts:
        raise ConfigError("no prompt; give --prompt TEXT or --prompts FILE")
    sampling = SamplingParams(temperature, top_p, top_k, max_new_tokens, tuple(stop or ()), (), seed)
    found = generate(
        GenerateSettings(
            model=model,
            prompts=tuple(texts),
            sampling=sampling,
            spec=spec,
            numerics=numerics,
            plan=plan,
            samples=samples,
            engine=engine,
            device=device,
            plain=plain,
            folder=guidance_dir,
            profile=profile,
        )
    )
    emit(found, as_json=as_json, text=_text(found))


def _text(found: dict[str, Any]) -> str:
    lines = []
    for row in found["samples"]:
        lines += [
            f"> {row['prompt']}",
            row["text"],
            f"  [{row['finish_reason']}, {row['tokens']} tokens, mean log-prob {row['mean_logprob']:.3f}]",
            "",
        ]
    if found["guidance"]:
        lines += [f"guidance ({found['plan']}): {found['guidance']['bytes_per_token']:.0f} B a token"]
        lines += [f"  {part}: {size} B" for part, size in found["guidance"]["parts"].items()]
    if found["profile"]:
        shares = found["profile"]["shares"].items()
        lines += ["time: " + ", ".join(f"{part.replace('_', ' ')} {share:.1%}" for part, share in shares)]
    return "\n".join(lines)
