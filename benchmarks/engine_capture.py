"""What recording costs an engine: throughput with guidance over throughput without, in one run.

Two or more engines of the same weights stand side by side, one for each plan, and take turns: every round each of them
generates the same requests, in an order that changes from round to round. Throughput is tokens a second of *processor
time*, summed over all processes and threads of the engine, so that other work on the machine counts as little as
possible. The ratio is taken within a round; printed is the median over rounds with the smallest and largest.

    python benchmarks/engine_capture.py sglang tiny-moe --plans none r1-all/s8 r1-all+mid/s8 --rounds 8
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from tracefp4.config import EngineConfig
from tracefp4.core import Request, SamplingParams
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.models.loading import load_model
from tracefp4.rollout.registry import make_engine


def requests_of(count: int, prompt: int, tokens: int, round_number: int) -> list[Request]:
    """Requests of one round, whose prompts no prefix cache has seen."""
    generator = torch.Generator().manual_seed(round_number)
    ids = torch.randint(3, 250, (count, prompt), generator=generator).tolist()
    # No end-of-sequence token ends a sample before its time: the lengths of all engines are equal.
    return [
        Request(f"r{round_number}-{i}", tuple(row), 1, SamplingParams(max_new_tokens=tokens, seed=i))
        for i, row in enumerate(ids)
    ]


def cpu_seconds(engine: object) -> float:
    """Processor time of the engine so far: of this process, or of every process in the session of a hosted one."""
    host = getattr(engine, "_host", None)
    if host is None:
        return time.process_time()
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent, group, session, ... user and system time.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == host._process.pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run; see the text of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("model")
    parser.add_argument("--spec", default="nvfp4-w4a4-kv4")
    parser.add_argument("--plans", nargs="+", default=["none", "r1-all/s8", "r1-all+mid/s8"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    spec, stores = get_spec(asked.spec), {plan: MemoryStore() for plan in asked.plans}
    slots = -(-(asked.requests + 2) * (asked.prompt + asked.tokens + 32) // 16) * 16
    with ExitStack() as stack:
        engines = {}
        for plan in asked.plans:
            engine = make_engine(
                asked.engine,
                model=copy.deepcopy(loaded.model),
                tokenizer=None,
                spec=spec,
                plan=Plan.parse(plan) or None,
                store=stores[plan],
                settings=EngineConfig(max_tokens=slots, max_batch=asked.requests),
            )
            stack.callback(engine.close)
            engine.sync(dict(loaded.model.named_parameters()), 0)
            engines[plan] = engine
        speeds: dict[str, list[float]] = {plan: [] for plan in asked.plans}
        for number in range(-1, asked.rounds):
            order = asked.plans if number % 2 else asked.plans[::-1]
            for plan in order:
                wanted = requests_of(asked.requests, asked.prompt, asked.tokens, number + 1)
                start = cpu_seconds(engines[plan])
                rollouts = engines[plan].generate(wanted)
                seconds = cpu_seconds(engines[plan]) - start
                if number >= 0:  # The first round warms up.
                    speeds[plan].append(sum(len(r.response_ids) for r in rollouts) / seconds)
                stores[plan].clear()
    report(asked, speeds)


def report(asked: argparse.Namespace, speeds: dict[str, list[float]]) -> None:
    """Print the table, and write it."""
    base = asked.plans[0]
    rows = []
    for plan, found in speeds.items():
        ratios = [a / b for a, b in zip(found, speeds[base], strict=True)]
        rows.append(
            {
                "plan": plan,
                "tokens_per_cpu_s": statistics.median(found),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
        speed, ratio = statistics.median(found), statistics.median(ratios)
        print(
            f"{plan:14} {speed:8.1f} tok a CPU second   ratio {ratio:.3f} [{min(ratios):.3f}, {max(ratios):.3f}]",
            flush=True,
        )
    facts = {k: v for k, v in vars(asked).items() if k not in ("output", "plans")}
    if asked.output is not None:
        found = {**facts, "threads": torch.get_num_threads(), "rows": rows}
        asked.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
