"""``tracefp4 compare``: methods by seeds of one configuration, and the paper's tables and figures of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.console import JsonOption, emit, stderr_console
from tracefp4.cli.jobs import Job, Step, run_jobs
from tracefp4.errors import ConfigError, suggest
from tracefp4.report.arms import PLANS, POSTHOC, REFERENCE, Arm, Base, arms_of, parse_arm, to_probe
from tracefp4.report.results import Results, collect, complete, load, run_folder

if TYPE_CHECKING:
    from tracefp4.config import Config


def run(
    config: Annotated[Path, typer.Argument(help="TOML file that all runs share.")],
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "bf16,qat,trace",
    seeds: Annotated[str, typer.Option(help="How many seeds (0, 1, ...), or a list such as 0,2.")] = "1",
    tables: Annotated[
        str,
        typer.Option(help="Tables of the paper: t1, t3, t4, t5, t6, t7, separated by commas. Default: the methods."),
    ] = "",
    plans: Annotated[
        str,
        typer.Option(help=f"Plans of table t5, separated by commas. Default: the configuration's, {', '.join(PLANS)}."),
    ] = "",
    arm: Annotated[
        list[str] | None, typer.Option(help="Another arm, NAME:method=...,key=value; may be repeated.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override for all runs; may be repeated.")] = None,
    against: Annotated[
        str, typer.Option(help="Arm whose differences the tables show besides those to bf16, such as qat.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this arm, as NAME or NAME/SEED; may be repeated.")
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; show what is there.")] = False,
    also: Annotated[
        list[Path] | None,
        typer.Option(help="results.json of this comparison from elsewhere; it fills in runs not done here."),
    ] = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Leave out the data of figures 6 and 10.")] = False,
    parallel: Annotated[
        int, typer.Option(min=1, help="Runs at a time; they are dealt out to the GPUs, which must have room for them.")
    ] = 1,
    keep_weights: Annotated[bool, typer.Option(help="Keep the checkpoints of finished runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder. Default: the config's output_dir with '-compare'.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run methods by seeds of one configuration, evaluate them, and write tables, figures and a page.

    Called again, it goes on with what is not finished: a run that died loses nothing but itself. Runs may go on side by
    side (--parallel), or on several machines (--only) with their folders copied together (--no-run).
    """
    from tracefp4 import config as settings

    shared = list(set_ or [])
    tree = settings.load(config, shared)
    target = out or Path(f"{tree.output_dir}-compare")
    names = [name.strip() for name in tables.split(",") if name.strip()] or ["main"]
    members = _members(names, tree, _words(methods), _words(plans), arm or [])
    arms = list({found.name: found for group in members.values() for found in group}.values())
    numbers = _seeds(seeds)
    _check(config, shared, arms, against)
    _claim(target, tree)
    console = stderr_console()

    def note(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    failed: list[str] = []
    if not no_run:
        jobs = _jobs(_Shared(config, shared, tree, target, keep_weights), arms, numbers, names, not no_probe)
        chosen = _chosen(jobs, only or [])
        failed = [job.name for job in run_jobs(chosen, note, parallel, _devices(tree.device) if parallel > 1 else [])]
    results = collect(
        target, arms, numbers, names, {n: [a.name for a in group] for n, group in members.items()}, _task(tree)
    )
    for path in also or []:
        complete(results, load(path))
    _finish(results, target, failed, as_json, against)
    if failed:
        raise typer.Exit(1)


def _finish(results: Results, target: Path, failed: list[str], as_json: bool, against: str) -> None:
    from tracefp4.report.comparison import verdict, write_comparison

    done = sum(len(results.done(arm.name)) for arm in results.arms)
    if not done:
        emit({"done": 0, "failed": failed}, as_json=as_json, text="no run is finished: there is nothing to show")
        return
    paths = write_comparison(results, target, against)
    said = verdict(results)
    data = {"done": done, "failed": failed, "verdict": said, **{name: str(path) for name, path in paths.items()}}
    emit(data, as_json=as_json, text="\n".join([*said, f"{done} runs; page: {paths['page']}"]))


def _members(
    names: Sequence[str], tree: Config, methods: Sequence[str], plans: Sequence[str], own: Sequence[str]
) -> dict[str, list[Arm]]:
    """Arms of each table; arms of the user's own are rows of the first."""
    from tracefp4.rl.plans import is_calm

    # Training refuses checked plans where the engine serves no pulls, and congruent scales of older weights.
    pulls = tree.engine == "embedded" and not min(tree.train.lag, tree.train.guided_lag)
    base = Base(tree.spec, tree.plan, pulls, is_calm(tree))
    members = {name: arms_of(name, base, methods, plans) for name in names}
    members[names[0]] += [parse_arm(text, base) for text in own]
    for name, group in members.items():
        if len({a.name for a in group}) < len(group):
            raise ConfigError(f"table {name!r} has two arms of one name; give each --arm a name of its own")
    return members


def _check(config: Path, shared: list[str], arms: Sequence[Arm], against: str) -> None:
    """Refuse every arm that training would refuse, before anything runs."""
    if against and against not in {found.name for found in arms}:
        raise ConfigError(f"--against {against!r} names no arm{suggest(against, [found.name for found in arms])}")
    from tracefp4 import config as settings
    from tracefp4.formats.spec import get_spec
    from tracefp4.rl.plans import resolved
    from tracefp4.rl.setup import check_training

    for arm in arms:
        tree = settings.load(config, [*shared, *arm.settings])
        if not tree.eval.items:
            raise ConfigError("a comparison needs held-out items; set eval.items (500 or more for narrow intervals)")
        get_spec(tree.spec, tree.numerics)
        check_training(resolved(tree))


def _claim(target: Path, tree: Config) -> None:
    """Keep the shared configuration in the folder; refuse a folder of another one."""
    from tracefp4.config_text import to_toml

    text, file = to_toml(tree), target / "config.toml"
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{target} holds a comparison of another configuration; choose another --out")
    target.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all runs of a comparison have in common."""

    config: Path
    overrides: list[str]
    tree: Config
    out: Path
    keep_weights: bool

    def job(self, arm: Arm, seed: int, posthoc: bool, probed: bool) -> Job:
        """The run of an arm with a seed, and what follows it."""
        folder = run_folder(self.out, arm.name, seed)
        overrides = [*self.overrides, *arm.settings, f"seed={seed}", f"output_dir={folder}"]
        spec = self._spec(overrides)
        overrides += [f"spec={spec}"] if spec else []
        if posthoc or probed:
            overrides.append("train.save_final=true")
        words = ["train", str(self.config), *(word for item in overrides for word in ("--set", item))]
        after = partial(_after, folder, arm, self.tree, posthoc, probed)
        return Job(arm.name, seed, folder, words, after, self.keep_weights)

    def _spec(self, overrides: list[str]) -> str | None:
        """All arms deploy the same layers: the spec of one that would choose how many it leaves in BF16."""
        from tracefp4 import config as settings
        from tracefp4.rl.bf16_layers import is_open

        tree = settings.load(self.config, overrides)
        return f"{tree.spec}/b0" if is_open(tree) else None


def _jobs(shared: _Shared, arms: Sequence[Arm], seeds: Sequence[int], tables: Sequence[str], probe: bool) -> list[Job]:
    """All runs, seed by seed, so that an early end leaves whole comparisons of fewer seeds.

    One run of trace is probed for figures 6 and 10; those of the reference are quantized for table t7.
    """
    probed = to_probe(arms) if probe else None
    return [
        shared.job(arm, seed, arm.name == REFERENCE and "t7" in tables, arm == probed and seed == seeds[0])
        for seed in seeds
        for arm in arms
    ]


def _after(folder: Path, arm: Arm, tree: Config, posthoc: bool, probed: bool) -> list[Step]:
    steps: list[Step] = []
    if posthoc:
        last = folder / "posthoc" / f"{POSTHOC[-1]}.json"
        steps.append(Step([str(folder)], last, "tracefp4.cli.posthoc", title="post-hoc quantization"))
    if probed:
        common = ["--spec", arm.spec, "--numerics", tree.numerics, "--device", tree.device]
        length = ["--max-new-tokens", str(tree.sampling.max_new_tokens)]
        plan = arm.plan if arm.plan else tree.plan
        measure = [
            "measure",
            str(folder),
            *common,
            *length,
            "--task",
            str(folder / "config.toml"),
            "--plan",
            plan,
            "--prompts",
            "16",
        ]
        steps.append(Step([*measure, "--samples", "2"], folder / "probe" / "measure.json", capture=True))
        prompts = [word for text in _prompts(folder) for word in ("--prompt", text)]
        rollout = ["rollout", str(folder), *common, *length, "--plan", plan, "--plain", "--samples", "4", "--profile"]
        steps.append(Step([*rollout, *prompts], folder / "probe" / "profile.json", capture=True))
    return steps


def _prompts(folder: Path, most: int = 8) -> list[str]:
    """A few prompts that the run was trained on, as text."""
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(json.loads(line)["prompt"] for line in lines))[:most]


def _chosen(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    if not only:
        return list(jobs)
    known = {name for job in jobs for name in (job.arm, f"{job.arm}/{job.seed}")}
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name!r} names no arm of this comparison (arms: {', '.join(_arms(jobs))})")
    return [job for job in jobs if job.arm in only or f"{job.arm}/{job.seed}" in only]


def _devices(name: str) -> list[str]:
    """GPUs that runs side by side are dealt out to; none where the configuration names one, or the CPU."""
    import torch

    if name not in ("auto", "cuda"):
        return []
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return visible or [str(i) for i in range(torch.cuda.device_count())]


def _arms(jobs: Sequence[Job]) -> list[str]:
    return list(dict.fromkeys(job.arm for job in jobs))


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in _words(text)]
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r} is neither a number of seeds nor a list of them") from error
    numbers = list(range(numbers[0])) if len(numbers) == 1 and "," not in text else numbers
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds {text!r}: give a positive number of seeds, or different seeds from 0 on")
    return numbers


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _task(tree: Config) -> str:
    return tree.task.name or tree.task.kind
