"""The loop end to end on a tiny policy: what it records, how it stops, how it resumes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tracefp4.core import Handle, Kind, Rollout
from tracefp4.errors import CheckpointError, ConfigError, GuidanceMismatch, GuidanceMissing, GuidanceStale, SyncError
from tracefp4.guidance import frame
from tracefp4.guidance.auto import LARGEST, Choice
from tracefp4.guidance.late_store import Shipping
from tracefp4.methods import METHODS
from tracefp4.models.key_basis import KeyBasis, basis_of, set_basis
from tracefp4.rl import bf16_layers
from tracefp4.rl import run as run_module
from tracefp4.rl.collect import digest_experience, guidance_size, make_requests, sampling_params, score
from tracefp4.rl.policies import load_named
from tracefp4.rl.run import Run
from tracefp4.rl.update import Tally
from tracefp4.training.batch import MicroBatch, collate

MakeRun = Callable[..., Run]

ALWAYS = {
    "reward/mean",
    "response_length/mean",
    "time/rollout_s",
    "time/reward_s",
    "time/train_s",
    "time/sync_s",
    "throughput/rollout_tok_s",
    "throughput/train_tok_s",
    "weight_version",
}
TRAINED = {
    "entropy",
    "mismatch_kl/mean",
    "mismatch_kl/max",
    "mismatch_kl/from_0",
    "logprob_diff/min",
    "logprob_diff/max",
    "logprob_diff/mean_abs",
    "logprob_diff/p99",
    "logprob_diff/p999",
    "grad_norm",
    "clip_frac",
}
GUIDED = {
    "mismatch_kl_unguided/mean",
    "mismatch_kl_unguided/max",
    "mismatch_kl_unguided/from_0",
    "guidance/coverage",
    "guidance/bits_per_value",
    "guidance/bytes_per_token",
    "guidance/flip_rate",
    "guidance/scale_mismatch",
    "guidance/saved_share",
}


def _train(run: Run, stop_after: int | None = None) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    run.train(lambda step, metrics: seen.append(metrics), lambda: stop_after is not None and len(seen) >= stop_after)
    return seen


def _lines(run: Run, name: str = "metrics") -> list[dict[str, Any]]:
    text = (run.folder / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _without_clocks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(("time", "throughput/"))} for line in lines]


def _experience(run: Run) -> tuple[list[Any], Any]:
    """Rollouts of the first step and what is learned from them, with all guidance still in the store."""
    config = run.config
    run.sync()
    items = run.task.items("train", config.train.prompts, (config.seed, "step", 0))
    requests = make_requests(items, run.prompter, sampling_params(config), config.train.samples, config.seed, "step-0")
    rollouts = run.engine.generate(requests)
    repeated = [item for item in items for _ in range(config.train.samples)]
    texts, rewards = score(rollouts, repeated, run.task, run.prompter.decode)
    return rollouts, digest_experience(rollouts, repeated, texts, rewards, config, run.store if run.plan else None)


# What is recorded -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_records_what_the_design_names(make_run: MakeRun, method: str) -> None:
    run = make_run(f"method={method}", "steps=2")
    run.describe(lambda _: None)
    steps = _train(run)
    trained = [m for m in steps if "grad_norm" in m]
    assert len(steps) == 2 and trained, "the warm start must leave groups with mixed rewards"
    for metrics in steps:
        assert metrics.keys() >= ALWAYS
    for metrics in trained:
        assert metrics.keys() >= TRAINED
        assert (metrics.keys() >= GUIDED) == METHODS[method].guided
        assert metrics["grad_norm"] > 0
        # Responses of four tokens are all in the first bucket.
        assert metrics["mismatch_kl/from_0"] == pytest.approx(metrics["mismatch_kl/mean"])
    assert all(math.isfinite(v) for m in steps for v in m.values())
    assert [m["weight_version"] for m in steps] == [1, 2]
    evaluations = [line for line in _lines(run) if "eval/chain_sum/pass@1" in line]
    assert [line["step"] for line in evaluations] == [0, 2]
    by_item = _lines(run, "evaluations")
    assert [line["step"] for line in by_item] == [0, 2]
    for line, scores in zip(evaluations, by_item, strict=True):
        assert sum(scores["eval/scores"]) / 4 == pytest.approx(line["eval/chain_sum/pass@1"])
    low, high = evaluations[0]["eval/chain_sum/pass@1_ci"]
    assert low <= evaluations[0]["eval/chain_sum/pass@1"] <= high


@pytest.mark.parametrize("method", ["bf16", "qat", "trace"])
def test_every_method_replays_the_rollouts_routes(make_run: MakeRun, method: str) -> None:
    run = make_run(f"method={method}", "steps=0", "eval.items=0")
    rollouts, experience = _experience(run)
    assert all((r.guidance is not None) == (method == "trace") for r in rollouts)
    for example in experience.examples:
        routes = example.routes
        assert routes is not None
        assert routes.shape == (example.rows, len(run.layout.moe_layers), run.layout.top_k)
    example = experience.examples[0]
    batch = collate([example], torch.device("cpu"))
    flipped = collate([dataclasses.replace(example, routes=(example.routes + 1) % 8)], torch.device("cpu"))
    assert not torch.equal(run.updater._forward(batch, guided=False), run.updater._forward(flipped, guided=False))


def test_samples_show_answers_and_both_ends_of_the_rewards(make_run: MakeRun) -> None:
    run = make_run("steps=2")
    trained = [step for step, metrics in enumerate(_train(run)) if "grad_norm" in metrics]
    samples = _lines(run, "samples")
    assert {row["step"] for row in samples} == {0, 1}
    for step in trained:
        rows = [row for row in samples if row["step"] == step]
        assert len(rows) == 4
        assert min(row["reward"] for row in rows) < max(row["reward"] for row in rows)
    for row in samples:
        assert row["prompt"].endswith("=")
        assert str(eval(row["prompt"][:-1])) == row["answer"]
        assert (row["response"].strip() == row["answer"]) == (row["reward"] == 1.0)


def test_guidance_size_counts_whole_frames(make_run: MakeRun) -> None:
    run = make_run("steps=1", "eval.items=0")
    (metrics,) = _train(run)
    values = sum(shape.values for shape in run.guided_shapes)
    assert metrics["guidance/bits_per_value"] == pytest.approx(8 * metrics["guidance/bytes_per_token"] / values)
    assert metrics["guidance/bits_per_value"] > 1 + 2 / 16


def test_saved_share_is_that_of_the_dropped_samples(make_run: MakeRun) -> None:
    run = make_run("steps=1", "eval.items=0")
    (metrics,) = _train(run)
    # Prompts are of one length and responses of at most four tokens, so bytes go with samples.
    dropped = metrics["samples/dropped"] / metrics["samples/total"]
    assert 0 < dropped < 1
    assert metrics["guidance/saved_share"] == pytest.approx(dropped, abs=0.05)
    assert metrics["guidance/dropped_frames"] == metrics["samples/dropped"]
    kept = 1 - metrics["guidance/saved_share"]
    shipped = metrics["guidance/shipped_bytes_per_token"]
    assert shipped == pytest.approx(kept * metrics["guidance/bytes_per_token"])


# Plans that are chosen as training goes -------------------------------------------------------------------------------


def test_a_plan_for_some_bytes_is_chosen_and_revisited(make_run: MakeRun) -> None:
    notes: list[str] = []
    run = make_run("plan=auto:150", "train.replan_every=2", "steps=3", "eval.items=0", "train.unguided_every=0")
    run.note = notes.append
    assert run.plan == LARGEST
    whole, part, again = _train(run)
    assert whole["guidance/bits_per_value"] > 0 and whole["time/plan_s"] > 0 and "time/plan_s" not in part
    assert part["guidance/bytes_per_token"] < whole["guidance/bytes_per_token"]
    assert again["guidance/bytes_per_token"] == pytest.approx(whole["guidance/bytes_per_token"], rel=0.05)
    assert part["guidance/coverage"] == again["guidance/coverage"] == 1.0
    assert run.plan not in (None, LARGEST)
    assert [text.split(":")[0] for text in notes if "passes" in text] == ["step 0", "step 2"]
    # The plan is part of a checkpoint: what resumes records what was chosen.
    plan = run.plan
    resumed = make_run("plan=auto:150", "train.replan_every=2", "steps=4", "eval.items=0", "train.unguided_every=0")
    assert (resumed.step, resumed.plan) == (3, plan)
    assert len(_train(resumed)) == 1


# Layers that are left in BF16 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("refit", ["bf16", "packed"])
def test_layers_left_in_bf16_are_so_on_both_sides(make_run: MakeRun, refit: str) -> None:
    run = make_run("spec=nvfp4-w4a4-kv4/b1", "plan=r1-all/s3", f"rollout.refit={refit}", "steps=2", "eval.items=0")
    lines: list[str] = []
    run.describe(lines.append)
    assert "trainer: the same, checked module by module" in lines
    assert {shape.site.layer for shape in run.guided_shapes} == {1, 2, 3}
    steps = _train(run)
    assert all(metrics["guidance/coverage"] == 1.0 for metrics in steps) and run.version == 2
    whole = make_run("plan=r1-all/s3", "steps=1", "eval.items=0", folder="whole")
    (other,) = _train(whole)
    assert steps[0]["guidance/bytes_per_token"] < 0.8 * other["guidance/bytes_per_token"]
    assert run.rollout_spec.hash != whole.rollout_spec.hash and run.engine.digest() != whole.engine.digest()


def test_a_run_settles_once_how_many_layers_stay_in_bf16(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = bf16_layers._choose

    def choose(config: Any, spec: Any, *rest: Any) -> Choice:
        asked.append(spec.name)
        return dataclasses.replace(real(config, spec, *rest), gap=1.0 if spec.bf16_layers else 9.0, full_gap=1.0)

    monkeypatch.setattr(bf16_layers, "_choose", choose)
    settings = ("plan=auto:100", "eval.items=0", "train.unguided_every=0")
    run = make_run(*settings, "steps=1")
    assert asked == ["nvfp4-w4a4-kv4", "nvfp4-w4a4-kv4/b1"]
    assert run.config.spec == "nvfp4-w4a4-kv4/b1" and run.rollout_spec.bf16_layers == run.trainer_spec.bf16_layers == 1
    assert {shape.site.layer for shape in run.guided_shapes} == {1, 2, 3}
    _train(run)
    # Whoever evaluates or repeats the run finds the deployment in its folder; a resumed one keeps it.
    assert 'spec = "nvfp4-w4a4-kv4/b1"' in (run.folder / "config.toml").read_text()
    for spec in ("nvfp4-w4a4-kv4", "nvfp4-w4a4-kv4/b1"):
        resumed = make_run(*settings, f"spec={spec}", "steps=2")
        assert (resumed.step, resumed.rollout_spec.bf16_layers) == (1, 1)
    with pytest.raises(CheckpointError, match="checkpoint of spec 'nvfp4-w4a4-kv4/b1', not 'nvfp4-w4a4-kv4/b0'"):
        make_run(*settings, "spec=nvfp4-w4a4-kv4/b0", "steps=2")
    assert make_run(*settings, "spec=nvfp4-w4a4-kv4/b0", folder="none").rollout_spec.bf16_layers == 0
    assert len(asked) == 2


def test_rollouts_of_earlier_steps_are_trained_on_with_their_guidance(make_run: MakeRun) -> None:
    run = make_run("train.lag=2", "train.guided_lag=2", "steps=4", "eval.items=0")
    steps = _train(run)
    assert ["grad_norm" in metrics for metrics in steps] == [False, False, True, True]
    assert [metrics["weight_version"] for metrics in steps] == [1, 2, 3, 4]
    assert all(metrics["guidance/coverage"] == 1.0 for metrics in steps[2:])
    # Two batches still wait; their guidance lies in the store, that of the others is gone.
    assert len(run.store.keys()) == sum(len(batch.examples) for batch in run.backlog) > 0


def test_old_rollouts_are_trained_on_without_guidance_unless_asked(make_run: MakeRun) -> None:
    steps = _train(make_run("train.lag=1", "steps=3", "eval.items=0"))
    assert all("grad_norm" in metrics and "guidance/coverage" not in metrics for metrics in steps[1:])
    assert [metrics["guidance/saved_share"] for metrics in steps[1:]] == [1.0, 1.0]


# What losses and corrections do in a run ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "reinforce", "tbpo"])
def test_every_loss_trains(make_run: MakeRun, name: str) -> None:
    steps = _train(make_run(f"loss.name={name}", "steps=1", "eval.items=0", "train.minibatches=2"))
    assert steps[0]["grad_norm"] > 0 and math.isfinite(steps[0]["loss"])


@pytest.mark.parametrize(
    "settings",
    [
        ("correction.level=sequence",),
        ("correction.name=mis", "correction.level=geometric"),
        ("correction.name=icepop",),
        ("correction.reject=seq_mean_k1=0.9_1.1,veto,opsm",),
    ],
)
def test_trace_combines_with_every_correction(make_run: MakeRun, settings: tuple[str, ...]) -> None:
    steps = _train(make_run(*settings, "steps=1", "eval.items=0", "train.minibatches=2"))
    assert steps[0]["guidance/coverage"] == 1.0
    assert 0 <= steps[0]["correction/rejected_frac"] < 1
    assert steps[0]["grad_norm"] > 0


@pytest.mark.parametrize("correction", ["tis", "none"])
def test_score_centering_uses_the_samplers_distribution(make_run: MakeRun, correction: str) -> None:
    run = make_run("method=tis_sc", f"correction.name={correction}", "loss.centering_top=16")
    assert run.config.loss.name == "reinforce" and run.top_logprobs == 16
    _, experience = _experience(run)
    assert all(e.top is None for e in experience.examples), "these requests did not ask"
    run.config = run.config.model_copy(update={"steps": 1})
    steps = _train(run)
    assert steps[0]["grad_norm"] > 0
    assert (steps[0]["correction/changed_frac"] > 0) <= (correction == "tis")


def test_trace_combines_with_score_centering(make_run: MakeRun) -> None:
    run = make_run("loss.name=reinforce", "loss.score_centering=true", "steps=1", "eval.items=0")
    (metrics,) = _train(run)
    assert metrics["guidance/coverage"] == 1.0 and metrics["grad_norm"] > 0


def test_compensated_rollouts_are_followed_in_their_kv_cache_alone(make_run: MakeRun) -> None:
    """The trainer scores them nearly as they were sampled, and much nearer than without the KV cache's guidance."""
    run = make_run("method=trace_quads", "plan=r1-all+mid/s2", "steps=1", "eval.items=0", "train.unguided_every=1")
    assert str(run.plan) == "r1-all:kv/s2" and {s.site.kind for s in run.guided_shapes} == {Kind.K, Kind.V}
    assert run.trainer_spec.activations is None and run.rollout_spec.activations is not None
    (metrics,) = _train(run)
    assert metrics["guidance/coverage"] == 1.0 and metrics["grad_norm"] > 0
    assert 0 < metrics["mismatch_kl/mean"] < metrics["mismatch_kl_unguided/mean"]


def test_a_method_with_settings_of_its_own_resumes(make_run: MakeRun) -> None:
    for method in ("qarl", "quads", "tis_sc", "trace_quads"):
        _train(make_run(f"method={method}", "steps=1", "eval.items=0", folder=method))
        assert make_run(f"method={method}", "steps=2", "eval.items=0", folder=method).step == 1


# Stopping and resuming ------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_run: MakeRun) -> None:
    settings = ("eval.every=2", "optimizer.warmup_steps=3")
    whole = make_run(*settings, folder="whole")
    _train(whole)
    first = make_run(*settings, folder="parts")
    assert len(_train(first, stop_after=2)) == 2
    second = make_run(*settings, folder="parts")
    assert (second.step, second.version) == (2, 2)
    assert len(_train(second)) == 2
    assert _without_clocks(_lines(second)) == _without_clocks(_lines(whole))
    for name in ("samples", "evaluations"):
        assert _lines(second, name) == _lines(whole, name)
    assert sum("grad_norm" in line for line in _lines(whole)) >= 3
    for (name, a), (_, b) in zip(whole.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for name, master in whole.optimizer.state().items():
        assert torch.equal(master, second.optimizer.state()[name]), name


def test_lines_after_the_checkpoint_are_measured_again(make_run: MakeRun) -> None:
    run = make_run("steps=2")
    _train(run)
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "reward/mean": 9.0}\n{"step": 3, "rewa')
    again = make_run("steps=3")
    _train(again)
    assert [line["step"] for line in _lines(again)] == [0, 0, 1, 2, 2, 3]
    assert all(line.get("reward/mean", 0.0) <= 1.0 for line in _lines(again))


def test_a_run_without_a_checkpoint_starts_anew_and_says_so(make_run: MakeRun) -> None:
    notes: list[str] = []
    _train(make_run("steps=1", "train.save_final=false"))
    again = make_run("steps=1", "train.save_final=false")
    again.note = notes.append
    _train(again)
    assert [line["step"] for line in _lines(again)] == [0, 0, 1]
    assert any("starts anew" in note for note in notes)


def test_a_stop_request_finishes_the_step_and_writes_a_checkpoint(make_run: MakeRun) -> None:
    run = make_run()
    assert len(_train(run, stop_after=1)) == 1
    assert (run.folder / "checkpoints" / "step-000001" / "manifest.json").is_file()
    assert [line["step"] for line in _lines(run)] == [0, 0]


def test_a_stop_without_a_checkpoint_is_said(make_run: MakeRun) -> None:
    notes: list[str] = []
    run = make_run("train.save_final=false")
    run.note = notes.append
    _train(run, stop_after=1)
    assert any("without a checkpoint" in note for note in notes)
    assert not (run.folder / "checkpoints").exists()


def test_a_resumed_run_began_from_the_start_of_its_checkpoint(make_run: MakeRun) -> None:
    """Not from what the same settings make on the machine that it goes on with."""
    base = ("warm_start.steps=0", "eval.items=0")
    run = make_run("steps=1", *base)
    run.start = dataclasses.replace(run.start, name="elsewhere")
    _train(run)
    assert make_run("steps=2", *base).start.name == "elsewhere"


def test_other_settings_refuse_to_resume(make_run: MakeRun) -> None:
    base = ("warm_start.steps=0", "eval.items=0")
    _train(make_run("steps=1", *base))
    assert make_run("steps=9", *base).step == 1
    for change in ("optimizer.lr=2e-4", "seed=1", "method=qat", "warm_start.steps=1"):
        with pytest.raises(CheckpointError, match="other settings"):
            make_run("steps=9", *base, change)


def test_a_run_whose_learning_rate_falls_towards_its_end_keeps_its_length(make_run: MakeRun) -> None:
    base = ("warm_start.steps=0", "eval.items=0", "optimizer.schedule=linear")
    _train(make_run("steps=2", *base), stop_after=1)
    assert make_run("steps=2", *base).step == 1
    with pytest.raises(CheckpointError, match="other settings"):
        make_run("steps=9", *base)


def test_the_time_budget_evaluates_and_stops(make_run: MakeRun) -> None:
    run = make_run("max_minutes=1e-6")
    assert len(_train(run)) == 1
    assert "eval/chain_sum/pass@1" in _lines(run)[-1]
    assert (run.folder / "checkpoints" / "step-000001").is_dir()


# What is proved and refused -------------------------------------------------------------------------------------------


def test_weights_that_differ_after_a_sync_stop_the_run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    run.sync()
    monkeypatch.setattr(run_module, "model_digest", lambda *_: "0" * 32)
    with pytest.raises(SyncError, match="weights differ after sync 0"):
        run.sync()


def test_a_changed_weight_changes_the_digest(make_run: MakeRun) -> None:
    run = make_run("warm_start.steps=0")
    run.sync()
    engine = run.engine.digest()
    with torch.no_grad():
        next(p for name, p in run.model.named_parameters() if name.endswith("down_proj")).mul_(1.5)
    assert run_module.model_digest(run.model, run.layout, run.rollout_spec.weights) != engine


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_p=0.9", "top_p = 1 and top_k = 0"),
        ("sampling.top_k=5", "top_p = 1 and top_k = 0"),
        ("train.minibatches=3", "does not divide"),
        ("method=trac", "did you mean 'trace'"),
        ("plan=none", "use method 'qat'"),
        ("plan=auto:lots", "did you mean 'auto:4096'"),
        ("train.lag=1,train.guided_lag=1,plan=r1-all/s2", "use plan 'r1-all/s8'"),
        ("train.lag=1,plan=auto:99", "changes as training goes"),
        ("engine=vllm,plan=c1-all/s2", "engine 'vllm' does not serve; use plan 'r1-all/s2'"),
        ("engine=vllm,key_basis=rotated", "engine 'vllm' stores keys as they are"),
        ("rollout.compile_decode=true,key_basis=rotated", "each layer's keys have a basis of their own"),
        ("decoder=replay", "'r4-all\\+mid/s2'"),
        ("correction.reject=vetoo", "did you mean 'veto'"),
        ("correction.low=9", "not below correction.high"),
        ("rollout.residual=0.5", "guidance does not know"),
        ("loss.score_centering=true", "loss.name = 'reinforce'"),
        ("loss.overlong_buffer=99", "longer than sampling.max_new_tokens"),
    ],
)
def test_contradicting_settings_are_refused_at_once(make_run: MakeRun, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(*override.split(","))


def test_guidance_that_trains_nothing_is_never_written(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("steps=1")
    written: list[int] = []
    real_encode = frame.encode_rows
    monkeypatch.setattr(frame, "encode_rows", lambda *a, **k: written.append(1) or real_encode(*a, **k))
    read: list[str] = []
    kept: list[tuple[str, ...]] = []
    real = run.store.get
    monkeypatch.setattr(run.store, "get", lambda handle: read.append(handle.key) or real(handle))
    update = run.updater.update

    def spy(examples: Any, load: Any, measure_unguided: bool) -> dict[str, float]:
        kept.append(run.store.keys())
        assert len(kept[-1]) == len(examples) < 32
        return update(examples, load, measure_unguided)

    monkeypatch.setattr(run.updater, "update", spy)
    _train(run)
    assert kept and set(read) == set(kept[0])
    assert len(written) == len(kept[0])
    assert run.store.keys() == ()
    assert run.store.nbytes == 0


def test_foreign_guidance_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    rollouts, experience = _experience(run)
    a, b = experience.examples[:2]
    rollouts[a.index], rollouts[b.index] = (
        dataclasses.replace(rollouts[a.index], guidance=rollouts[b.index].guidance),
        dataclasses.replace(rollouts[b.index], guidance=rollouts[a.index].guidance),
    )
    before = [p.clone() for p in run.model.parameters()]
    with pytest.raises(GuidanceMismatch):
        run.updater.update(experience.examples, run._loader(rollouts), measure_unguided=False)
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))


def test_stale_absent_and_otherwise_shaped_guidance_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    rollouts, experience = _experience(run)
    example = experience.examples[0]
    load = run._loader(rollouts)
    assert load is not None and load([example])[0].rows == example.rows
    with pytest.raises(GuidanceMismatch, match="expected nothing"):
        dataclasses.replace(load, expect=dataclasses.replace(load.expect, shapes=run.guided_shapes[1:]))([example])
    run.version += 1
    stale = run._loader(rollouts)
    assert stale is not None
    with pytest.raises(GuidanceStale):
        stale([example])
    rollouts[example.index] = dataclasses.replace(rollouts[example.index], guidance=None)
    with pytest.raises(GuidanceMissing, match="no guidance handle"):
        load([example])


def test_too_little_coverage_stops_before_the_update(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("optimizer.lr=1e-2")
    rollouts, experience = _experience(run)
    source = run._loader(rollouts)
    assert source is not None

    def half(examples: Any) -> Any:
        records = source(examples)
        return [dataclasses.replace(record, valid=torch.arange(record.rows) % 2 == 0) for record in records]

    before = [p.clone() for p in run.model.parameters()]
    with pytest.raises(GuidanceMissing, match="less than train.min_coverage = 0.99"):
        run.updater.update(experience.examples, half, measure_unguided=False)
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True))
    assert not run.optimizer.gradients()
    tolerant = make_run("train.min_coverage=0.2", folder="tolerant")
    metrics = tolerant.updater.update(experience.examples, half, measure_unguided=False)
    assert 0.4 < metrics["guidance/coverage"] < 0.7


# The update -----------------------------------------------------------------------------------------------------------


def _micro_tokens(run: Run, size: int) -> None:
    """Set the size of micro-batches after the warm start, which depends on it."""
    train = run.config.train.model_copy(update={"micro_tokens": size})
    run.updater.config = run.config.model_copy(update={"train": train})


def test_minibatches_use_log_probs_from_before_the_update(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_run("optimizer.lr=1e-3", folder="one")
    rollouts, experience = _experience(one)
    load = one._loader(rollouts)
    two = make_run("optimizer.lr=1e-3", "train.minibatches=2", folder="two")
    for run in (one, two):
        _micro_tokens(run, 32)
    single = one.updater.update(experience.examples, load, measure_unguided=False)
    changes: dict[int, list[float]] = {}

    class Watched(Tally):
        def add(self, batch: MicroBatch, logprobs: torch.Tensor, *rest: Any) -> None:
            change = (logprobs - self.old(batch, logprobs))[batch.response].abs().max()
            changes.setdefault(two.optimizer.steps, []).append(float(change))
            super().add(batch, logprobs, *rest)

    monkeypatch.setattr("tracefp4.rl.update.Tally", Watched)
    double = two.updater.update(experience.examples, load, measure_unguided=False)
    assert (one.optimizer.steps, two.optimizer.steps) == (1, 2)
    assert len(changes[0]) > 1 and set(changes[0]) == {0.0}
    assert max(changes[1]) > 0.0
    assert double["ratio/max"] > 1.0 == single["ratio/max"]
    # Both are the mismatch before any update; other micro-batches differ in bfloat16's last bits.
    assert double["logprob_diff/mean_abs"] == pytest.approx(single["logprob_diff/mean_abs"], abs=0.003)


def test_micro_batches_change_the_gradient_in_rounding_only(make_run: MakeRun) -> None:
    run = make_run()
    rollouts, experience = _experience(run)
    load = run._loader(rollouts)
    gradients = []
    for size in (16384, 24, 1):
        _micro_tokens(run, size)
        run.updater._accumulate(experience.examples, load, Tally(None))
        gradients.append(torch.cat([grad.flatten() for grad in run.optimizer.gradients().values()]))
        run.optimizer.zero_grad()
    whole = gradients[0]
    assert whole.norm() > 0
    for part in gradients[1:]:
        assert (part - whole).norm() / whole.norm() < 0.01


def test_the_reference_is_neither_guided_nor_replayed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("loss.kl=0.1", "steps=2", "eval.items=0", "optimizer.lr=1e-3")
    reference = run.updater._reference
    assert reference is not None
    seen: list[tuple[MicroBatch, torch.Tensor]] = []

    def spy(batch: MicroBatch) -> torch.Tensor:
        seen.append((batch, reference(batch)))
        return seen[-1][1]

    run.updater._reference = spy
    steps = _train(run)
    assert seen and all(batch.guidance is not None and batch.routes is not None for batch, _ in seen)
    for batch, logprobs in seen:
        # The reference does not change, and what the rollout recorded does not reach it.
        assert torch.equal(reference(dataclasses.replace(batch, guidance=None, routes=None)), logprobs)
    last = [m for m in steps if "grad_norm" in m][-1]
    assert 0 < last["kl_reference/mean"] < 1


def test_a_kl_weight_changes_the_gradient(make_run: MakeRun) -> None:
    norms = {}
    for weight in (0.0, 5.0):
        run = make_run(f"loss.kl={weight}", "steps=2", "eval.items=0", "optimizer.lr=1e-3", folder=f"kl-{weight}")
        norms[weight] = [m["grad_norm"] for m in _train(run) if "grad_norm" in m]
    assert norms[0.0] != norms[5.0]


# Specs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mxfp4-w4a8-kv4", "mxfp4-w4a4-kv4", "mxfp4-w4a16-kv4", "nvfp4-w4a4", "nvfp4-kv4"])
def test_other_specs_train_with_the_sites_they_have(make_run: MakeRun, spec: str) -> None:
    run = make_run(f"spec={spec}", "steps=2", "eval.items=0")
    said: list[str] = []
    run.describe(said.append)
    expected = {
        "mxfp4-w4a8-kv4": {Kind.K, Kind.V, Kind.EXPERTS_IN, Kind.EXPERTS_MID},
        "mxfp4-w4a4-kv4": {Kind.K, Kind.V, Kind.EXPERTS_IN, Kind.EXPERTS_MID},
        "mxfp4-w4a16-kv4": {Kind.K, Kind.V},
        "nvfp4-w4a4": {Kind.EXPERTS_IN, Kind.EXPERTS_MID},
        "nvfp4-kv4": {Kind.K, Kind.V},
    }
    assert {shape.site.kind for shape in run.guided_shapes} == expected[spec]
    trained = [m for m in _train(run) if "grad_norm" in m]
    assert trained and trained[0]["guidance/coverage"] == 1.0
    per_token = frame.bytes_per_token(run.plan, run.guided_shapes, run.layout.num_layers)  # type: ignore[arg-type]
    assert any(f"{per_token:.0f} B a token" in line for line in said)
    assert trained[0]["guidance/bytes_per_token"] > per_token


@pytest.mark.parametrize("name", ["rotated", "centred-rotated"])
def test_engine_and_trainer_store_keys_in_one_basis(make_run: MakeRun, name: str) -> None:
    settings = ("method=qat", f"key_basis={name}", "steps=1", "eval.items=0")
    run, other = make_run(*settings), make_run(*settings, folder="other")
    for path in other.layout.attentions.values():
        set_basis(other.model.get_submodule(path), KeyBasis(None, None))  # the engine has a copy with its own
    (one,), (apart,) = _train(run), _train(other)
    assert one["mismatch_kl/mean"] < 0.1 * apart["mismatch_kl/mean"]


def test_the_policy_of_a_run_is_loaded_with_its_basis(make_run: MakeRun) -> None:
    run = make_run("method=qat", "key_basis=centred-rotated", "steps=1", "eval.items=0")
    _train(run)
    run.save()
    loaded = load_named(str(run.folder), "cpu").model
    for path in run.layout.attentions.values():
        own, found = basis_of(run.model.get_submodule(path)), basis_of(loaded.get_submodule(path))
        assert own is not None and found is not None and own.centre is not None and own.signs is not None
        assert torch.equal(found.centre, own.centre) and torch.equal(found.signs, own.signs)


def test_a_policy_whose_keys_are_not_rounded_has_no_basis(make_run: MakeRun) -> None:
    run = make_run("method=bf16", "key_basis=centred-rotated", "steps=1", "eval.items=0")
    assert all(basis_of(run.model.get_submodule(path)) is None for path in run.layout.attentions.values())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", ["quarter", "half", "all"])
def test_plans_of_every_width_and_depth_select_what_they_say(make_run: MakeRun, bits: int, depth: str) -> None:
    layers = {"quarter": 1, "half": 2, "all": 4}[depth]
    for suffix, kinds in (("", 3), ("+mid", 4)):
        run = make_run(f"plan=r{bits}-{depth}{suffix}", "warm_start.steps=0", folder=suffix or "paper")
        assert run.plan is not None and run.plan.bits == bits
        assert len(run.guided_shapes) == layers * kinds
        assert min(shape.site.layer for shape in run.guided_shapes) == 4 - layers


def test_congruent_scales_are_checked_in_every_step(make_run: MakeRun) -> None:
    run = make_run("plan=r1-all+mid/s3", "steps=2", "eval.items=0")
    trained = [m for m in _train(run) if "grad_norm" in m]
    assert trained
    for metrics in trained:
        assert metrics.keys() >= GUIDED
        assert 0 <= metrics["guidance/scale_check_failures"] < 0.2
        assert 0 <= metrics["guidance/flip_rate"] < 0.1
        assert 0 <= metrics["guidance/scale_mismatch"] < 0.1


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_checked_plan_trains_as_its_bits_do_and_ships_what_it_pulls(make_run: MakeRun, recomputed: bool) -> None:
    settings = ("steps=2", "eval.items=0", f"train.gradient_checkpointing={str(recomputed).lower()}")
    sent = _train(make_run(*settings, "plan=r1-all+mid/s2", folder="sent"))
    run = make_run(*settings, "plan=c1-all+mid/s2", folder="checked")
    asked = []
    pull = run.store.pull
    run.store.pull = lambda *given: asked.extend(found := pull(*given)) or found
    checked = _train(run)
    assert not run.store.keys()
    weights = {"guidance/bytes_per_token", "guidance/bits_per_value", "guidance/shipped_bytes_per_token"}
    apart = {"guidance/pulled_share", "guidance/saved_share", *weights}
    for one, other in zip(_without_clocks(sent), _without_clocks(checked), strict=True):
        assert {k: v for k, v in one.items() if k not in apart} == {k: v for k, v in other.items() if k not in apart}
    trained = [m for m in checked if "grad_norm" in m]
    assert trained and all(0 < m["guidance/pulled_share"] < 1 for m in trained)
    # Bytes of frames alone: those of the plan without what was pulled.
    rows = [m["guidance/bytes_per_token"] / m["guidance/bits_per_value"] for m in checked]
    assert rows == pytest.approx([sum(shape.values for shape in run.guided_shapes) / 8] * 2)
    assert sum(bits.nbytes for bits in asked) > 0


def test_pulled_bytes_are_shipped_bytes() -> None:
    rollout = Rollout("a", 0, (1, 2), (3, 4), (0.0, 0.0), 0, "stop", guidance=Handle("s", "k", 300))
    found = guidance_size([rollout], 16, Shipping(claimed=1, claimed_bytes=300, pulled_bytes=90))
    assert found["guidance/bytes_per_token"] == found["guidance/shipped_bytes_per_token"] == 130
    assert found["guidance/bits_per_value"] == 65 and found["guidance/saved_share"] == 0


def test_gradient_checkpointing_changes_nothing(make_run: MakeRun) -> None:
    plain = _train(make_run("steps=1", "eval.items=0", folder="plain"))
    recomputed = _train(make_run("steps=1", "eval.items=0", "train.gradient_checkpointing=true", folder="again"))
    assert _without_clocks(plain) == _without_clocks(recomputed)


def test_the_record_lies_in_the_run_folder(make_run: MakeRun) -> None:
    run = make_run("steps=1")
    _train(run)
    names = {path.name for path in Path(run.folder).iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints"}
    assert not {name for name in names if "writing" in name}
