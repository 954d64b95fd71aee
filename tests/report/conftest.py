"""Run folders that look like real ones: learning curves with noise, rare evaluations, a mismatch in decades."""

import json
import math
import random

import pytest

CONFIG = """policy = "smollm2-moe"
method = "{method}"
spec = "nvfp4-w4a4-kv4"
plan = "r1-all+mid/s8"
steps = {steps}
seed = {seed}

[task]
kind = "reasoning_gym"
name = "chain_sum"

[train]
prompts = 16
samples = 8
"""


def metrics(step, steps, rng, method="trace"):
    """One line of metrics of a plausible run."""
    learned = 1 / (1 + math.exp(-(step - 0.4 * steps) / (0.12 * steps)))
    slow = {"trace": 1.0, "bf16": 1.02, "qat": 0.7}[method]
    gap = {"trace": 9e-4, "bf16": 1.3e-3, "qat": 0.22}[method]
    row = {
        "step": step,
        "time": 1.7e9 + 11.5 * step,
        "reward/mean": 0.18 + 0.6 * slow * learned + rng.gauss(0, 0.03),
        "response_length/mean": 22 + 9 * learned + rng.gauss(0, 1),
        "entropy": 1.4 - 0.8 * learned + rng.gauss(0, 0.03),
        "mismatch_kl/mean": gap * math.exp(rng.gauss(0, 0.25)) * (1 - 0.4 * learned),
        "mismatch_kl/max": gap * 90,
        "logprob_diff/max": 6 * math.sqrt(gap) * (1 + rng.random()),
        "logprob_diff/min": -6 * math.sqrt(gap) * (1 + rng.random()),
        "logprob_diff/mean_abs": 0.7 * math.sqrt(gap),
        "logprob_diff/p99": 3 * math.sqrt(gap),
        "logprob_diff/p999": 5 * math.sqrt(gap),
        "grad_norm": 0.4 * math.exp(rng.gauss(0, 0.3)),
        "clip_frac": 0.01,
        "time/rollout_s": 6.2 + rng.random(),
        "time/reward_s": 0.2,
        "time/train_s": 4.1 + 0.5 * rng.random(),
        "time/sync_s": 0.5,
        "throughput/rollout_tok_s": 610 + 30 * rng.random(),
        "throughput/train_tok_s": 930 + 40 * rng.random(),
        "weight_version": step,
    }
    if method == "trace":
        row |= {
            "guidance/coverage": 1.0,
            "guidance/bits_per_value": 1.5,
            "guidance/bytes_per_token": 5310.0,
            "guidance/flip_rate": 0.031 + 0.003 * rng.random(),
            "guidance/scale_mismatch": 0.012 + 0.002 * rng.random(),
        }
        if step % 5 == 0:
            row["mismatch_kl_unguided/mean"] = 0.27 * math.exp(rng.gauss(0, 0.3))
    return row


def make_run(folder, steps=60, method="trace", seed=0, extras=True):
    """Write a run folder and return it."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(method=method, steps=steps, seed=seed))
    lines = [metrics(step, steps, rng, method) for step in range(steps)]
    for step in {0, steps // 2, steps - 1}:
        rate = lines[step]["reward/mean"] - 0.03
        lines[step] |= {"eval/chain_sum/pass@1": rate, "eval/chain_sum/pass@1_ci": [rate - 0.04, rate + 0.04]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if extras:
        samples = [
            {"step": step, "prompt": "State the final answer: 4 + 3 - 2 =", "response": text, "reward": reward}
            for step in (0, steps - 1)
            for text, reward in (
                ("The answer is <b>7</b>.", 0.0),
                ("4 + 3 is 7, minus 2 is 5.\n<answer>5</answer>", 1.0),
            )
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
        summary = {
            "mismatch_kl_floor": 1.4e-3,
            "environment": {"device": "cpu", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def write_run(tmp_path):
    """Write a run folder ``name`` under a temporary folder and return its path."""
    return lambda name="trace", **options: make_run(tmp_path / name, **options)
