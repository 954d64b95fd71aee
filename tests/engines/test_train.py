"""``tracefp4 train`` with packed weights on every engine, from the command line to the numbers that it leaves."""

from __future__ import annotations

import json

import pytest

from tracefp4.cli import main
from tracefp4.models.layout import describe
from tracefp4.models.loading import load_model
from tracefp4.models.packing import expert_weights

CONFIG = """
policy = "tiny-moe"
method = "trace"
spec = "nvfp4-w4a4-kv4"
plan = "r1-all+mid/s8"
steps = 2
device = "cpu"
threads = 1

[task]
kind = "reasoning_gym"
name = "chain_sum"
[task.options]
config = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
template = "{expression}="
extract = "last_line"

[warm_start]
steps = 30
batch_size = 16
lr = 3e-3

[sampling]
max_new_tokens = 4

[optimizer]
lr = 1e-3

[rollout]
max_tokens = 1024
page_size = 32
max_batch = 32
prefill_chunk = 128

[train]
prompts = 4
samples = 8
gradient_checkpointing = false
save_final = false

[eval]
items = 0
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Of this module, so that the warm start is made once and nothing is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEFP4_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def train(folder, engine, refit):
    """Metrics of each step of a run."""
    file = folder / "run.toml"
    file.write_text(CONFIG)
    out = folder / refit
    options = {"engine": engine, "rollout.refit": refit, "output_dir": out}
    sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    assert main.run(["train", str(file), *sets]) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_with_packed_weights_sends_fewer_bytes_and_trains(engine_name, tmp_path):
    model = load_model("tiny-moe").model
    whole = sum(p.nbytes for p in model.parameters())
    experts = [weight for _, weight, _ in expert_weights(model, describe(model))]
    rest = whole - sum(weight.nbytes for weight in experts)
    # 4 bits a code, 8 for the scale of 16, and 32 for an expert's.
    packed = sum(weight.numel() * 9 // 16 + 4 * weight.shape[0] for weight in experts)
    steps = train(tmp_path, engine_name, "packed")
    assert [step["sync/bytes"] for step in steps] == [rest + packed] * 2
    assert 3.4 < (whole - rest) / packed < 3.6
    # Each sync was proved by its checksum, or the run would have stopped; the probe came first.
    assert [step["weight_version"] for step in steps] == [1, 2]
    assert all(step["grad_norm"] > 0.0 for step in steps)
    assert all(step["guidance/coverage"] == 1.0 and step["mismatch_kl/mean"] < 1e-3 for step in steps)


def test_packed_and_plain_weights_train_alike(tmp_path):
    plain, packed = (train(tmp_path, "embedded", refit) for refit in ("bf16", "packed"))
    for one, other in zip(plain, packed, strict=True):
        same = {name for name in one if not name.startswith(("time", "throughput/")) and name != "sync/bytes"}
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert one["sync/bytes"] > other["sync/bytes"]


def test_experts_that_are_not_quantized_cannot_be_sent_packed(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    assert main.run(["train", str(file), "--set", "method=bf16", "--set", "rollout.refit=packed"]) != 0
    assert "rollout.refit = 'packed' sends quantized experts, but spec 'bf16'" in capsys.readouterr().err
