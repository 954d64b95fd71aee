"""Which kernels, and which waiting of the GPU, make one arm slower than another.

    python benchmarks/profile_steps.py train --arm bf16 --arm "fp4 guided" --output train.json
    python benchmarks/profile_steps.py rollout --compile --batch 512 --context 320
    python benchmarks/profile_steps.py decode --shape 30b --arm bf16 --arm nvfp4-w4a4-kv4
    python benchmarks/profile_steps.py train --device cpu --shape tiny --batch 1 --context 32

Steps are those of ``tracefp4 bench`` with the same words: an optimizer step of ``train``; a step of the engine's loop
in the middle of a rollout, with all sequences decoding; a captured decode step alone, replayed. Each arm is warmed up,
timed for a few steps without the profiler, and profiled for as many. Printed are the time of a step on the host's
clock, in how much of it the GPU was busy and idle, the longest gaps with what ran before and after, kernels by total
time, and, for each arm but the first, what it takes more than the first, kernel by kernel. Steps of ``train`` and
``decode`` wait for the device at their end, as in the benchmark; steps of a rollout do not.

On a CPU operators stand in the place of kernels. The JSON is written after each arm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch

from tracefp4.cli.bench import SMALL_CONTEXT
from tracefp4.cli.bench_options import check_names
from tracefp4.errors import ConfigError, TraceError
from tracefp4.evaluation import bench_engine, bench_rollout, bench_train
from tracefp4.evaluation.bench import Bench, failures, need_cuda, pick_device, wait_for
from tracefp4.evaluation.fill import fill_engine
from tracefp4.evaluation.steps import Steps
from tracefp4.evaluation.timeline import Profile, difference, observe
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.report.run_report import write_text

Work = Callable[[int], None]
"""Does as many steps as it is told."""
ROLLOUT_ARMS = {bench_rollout.arm_of(*arm): arm for arm in bench_rollout.ARMS}
SAMPLES, PROMPT_SHARE = 8, 5
"""Samples of a prompt, and the part of a context that is prompt, as in ``bench rollout``."""
NAME_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Options:
    """What is profiled."""

    case: str
    arms: tuple[str, ...]
    shape: str
    batch: int
    context: int
    layers: int | None
    compiled: bool
    warmup: int
    steps: int
    device: torch.device


def main(arguments: list[str] | None = None) -> int:
    """Profile the arms one after the other."""
    given = _parser().parse_args(arguments)
    try:
        options = _options(given)
        found = run(options, given.output)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text_of(found))
    return 1 if found["failures"] else 0


def run(options: Options, output: Path | None = None) -> dict[str, Any]:
    """Profile all arms.

    Args:
        options: what.
        output: file for the JSON, replaced after each arm.

    Returns:
        What is printed and written.
    """
    device = options.device
    if device.type == "cuda":
        # Whatever watches a GPU should be there before graphs are made, or it may not see into them.
        observe("", lambda steps: torch.ones(1, device=device), 1, device)
    opened: dict[str, Callable[[str], AbstractContextManager[Work]]] = {
        "train": _train(options), "rollout": partial(_rollout, options), "decode": partial(_decode, options),
    }  # fmt: skip
    profiles: list[Profile] = []
    found: dict[str, Any] = {
        "case": options.case, "shape": options.shape, "batch": options.batch, "context": options.context,
        "compiled": options.compiled, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "arms": [], "differences": [], "failures": [],
    }  # fmt: skip
    for arm in options.arms:
        try:
            with opened[options.case](arm) as work:
                profiles.append(observe(arm, work, options.steps, device))
            found["arms"].append(profiles[-1].to_dict())
            if len(profiles) > 1:
                found["differences"].append(difference(profiles[0], profiles[-1]))
        except failures() as error:
            found["failures"].append(f"{arm}: {type(error).__name__}: {error}")
        bench_engine.release()
        if output is not None:
            write_text(output, json.dumps(found, indent=1) + "\n")
    return found


def _train(options: Options) -> Callable[[str], AbstractContextManager[Work]]:
    made: list[bench_train.Case] = []

    @contextmanager
    def open_arm(name: str) -> Iterator[Work]:
        if not made:
            shape = bench_train.SHAPES[options.shape]
            made.append(
                bench_train.Case.make(shape, options.batch, options.context, options.device, recompute=False)
            )  # fmt: skip
            made[0].prepare(options.arms)
        with made[0].step(bench_train.ARMS[name]) as step:
            work = _repeated(step, options.device)
            work(options.warmup)
            yield work

    return open_arm


@contextmanager
def _decode(options: Options, spec: str) -> Iterator[Work]:
    part = bench_engine.slice_of(options.shape, options.layers, options.context, options.compiled)
    room = options.batch * bench_engine.paged(options.context)
    engine = bench_engine.make_engine(part, spec, None, options.device, room, options.batch)
    bench_engine.warm(engine)
    fill_engine(engine)
    with Steps(engine, options.batch, options.context).own().ready() as step:
        work = _repeated(step, options.device)
        work(options.warmup)
        yield work
    engine.close()


@contextmanager
def _rollout(options: Options, arm: str) -> Iterator[Work]:
    load = _load(options)
    part = bench_engine.slice_of(options.shape, options.layers, load.context, options.compiled)
    store = LateStore(MemoryStore())
    engine = load.engine(part, *ROLLOUT_ARMS[arm], options.device, store)
    engine.generate(load.requests(0))  # compiles and captures every graph
    store.clear()
    for request in load.requests(1):
        engine.add(request)

    def work(steps: int) -> None:
        for _ in range(steps):
            engine.step()

    while engine.scheduler.has_prefill:
        engine.step()
    # The middle of the rollout lies between the steps that are timed and those that are profiled.
    work(max(options.warmup, load.new_tokens // 2 - options.steps))
    if (running := len(engine.scheduler.running)) < load.batch:
        raise ConfigError(f"{running} of {load.batch} sequences decode at once; ask for fewer, or a longer context")
    yield work
    engine.close()


def _repeated(step: Callable[[], object], device: torch.device) -> Work:
    def work(steps: int) -> None:
        for _ in range(steps):
            step()
            wait_for(device)

    return work


def _load(options: Options) -> bench_rollout.Load:
    samples, prompt = gcd(options.batch, SAMPLES), max(1, options.context // PROMPT_SHARE)
    return bench_rollout.Load(options.batch // samples, samples, prompt, options.context - prompt)


def _options(given: argparse.Namespace) -> Options:
    """Check what was asked for, and fill in what was not."""
    case, device = given.case, pick_device(given.device)
    shapes, arms, usual = {
        "train": (bench_train.SHAPES, bench_train.ARMS, ("smollm2-moe", "bf16", "fp4 guided")),
        "rollout": (bench_engine.SHAPES, ROLLOUT_ARMS, ("smollm2-moe", *list(ROLLOUT_ARMS)[:2])),
        "decode": (
            bench_engine.SHAPES, bench_engine.SPECS + bench_engine.WEIGHTS_ALONE, ("30b", "bf16", "nvfp4-w4a4-kv4")
        ),
    }[case]  # fmt: skip
    shape = given.shape or usual[0]
    check_names((shape,), shapes, "shape")
    check_names(tuple(given.arm or ()), arms, "arm")
    small = shape.startswith("tiny")
    if not small and case != "train":
        need_cuda(Bench(device), case)
    sizes = {
        "train": bench_train.SIZES.get(shape, (0, 0)),
        "rollout": (16, 64) if small else (512, 320),
        "decode": (64, SMALL_CONTEXT if small else 8192),
    }[case]
    options = Options(
        case, tuple(given.arm or usual[1:]), shape, given.batch or sizes[0], given.context or sizes[1], given.layers,
        given.compiled, given.warmup, given.steps, device,
    )  # fmt: skip
    if case == "rollout" and (most := _load(options).new_tokens - 2) < options.warmup + 2 * options.steps:
        raise ConfigError(f"a context of {options.context} tokens has {most} decode steps; ask for a longer one")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Profile a few steps of tracefp4 bench, arm by arm.")

    def at_least(least: int) -> Callable[[str], int]:
        def number(text: str) -> int:
            if int(text) < least:
                raise ValueError
            return int(text)

        return number

    parser.add_argument("case", choices=("train", "rollout", "decode"))
    parser.add_argument("--arm", action="append", help="may be repeated; the others are compared with the first")
    parser.add_argument("--shape")
    parser.add_argument("--batch", type=at_least(1), help="sequences")
    parser.add_argument("--context", type=at_least(2), help="rows or tokens of a sequence; prompt and response")
    parser.add_argument("--layers", type=at_least(1), help="of the random model, for rollout and decode")
    parser.add_argument("--compile", action="store_true", dest="compiled", help="for rollout and decode")
    parser.add_argument("--warmup", type=at_least(1), default=3, help="steps that do not count")
    parser.add_argument("--steps", type=at_least(1), default=5, help="steps that are timed, and then profiled")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="also write JSON to this file")
    return parser


def text_of(found: dict[str, Any]) -> str:
    """For a terminal; microseconds of a step."""
    lines = [
        f"{found['case']} {found['shape']}, {found['batch']} x {found['context']}, {found['device']}, "
        f"torch {found['torch']}; us of a step"
    ]
    for arm in found["arms"]:
        parts = f"busy {arm['busy_us']:.0f}, idle {arm['idle_us']:.0f}"
        lines += [
            "",
            f"{arm['arm']}: {arm['wall_us']:.0f} a step ({arm['profiled_us']:.0f} with the profiler: {parts})",
        ]
        lines += [f"  kernels add up to {arm['kernels_us']:.0f}"]
        if arm["gaps: us, before, after"]:
            lines.append(f"  {'gap':>10}  between")
        lines += [f"  {us:10.1f}  {_short(a, 48)} | {_short(b, 48)}" for us, a, b in arm["gaps: us, before, after"]]
        lines += [f"  {'us':>10} {'launches':>9}  kernel"]
        lines += [f"  {us:10.1f} {n:9.1f}  {_short(name)}" for us, n, name in arm["kernels: us, launches, name"]]
    for one in found["differences"]:
        parts = f"busy {one['busy_us']:+.0f}, idle {one['idle_us']:+.0f}"
        lines += ["", f"{one['arm']} less {one['against']}: {one['wall_us']:+.0f} a step"]
        lines += [f"  {one['profiled_us']:+.0f} with the profiler: {parts}; kernels {one['kernels_us']:+.0f}"]
        lines += [f"  {'more':>10} {'from':>10} {'to':>10} {'launches':>17}  kernel"]
        for more, a, b, m, n, name in one["kernels: us more, us against, us, launches against, launches, name"]:
            lines.append(f"  {more:+10.1f} {a:10.1f} {b:10.1f} {m:8.1f} {n:8.1f}  {_short(name)}")
    lines += [f"failed: {line}" for line in found["failures"]]
    return "\n".join(lines)


def _short(name: str, width: int = NAME_WIDTH) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
