"""The benchmark of a training step: its arms train what they say, and its bound counts what it says."""

from __future__ import annotations

import pytest
import torch

from tracefp4.evaluation import bench_train
from tracefp4.evaluation.bench import Bench
from tracefp4.evaluation.bench_train import Shape

CPU = torch.device("cpu")
SMALL = Shape(
    layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, experts=4, top_k=2, inter=32, vocabulary=64
)  # fmt: skip


@pytest.fixture
def case() -> bench_train.Case:
    torch.manual_seed(0)
    made = bench_train.Case.make(SMALL, 1, 12, CPU)
    made.prepare(["fp4 guided", "fp4 guided s2"])
    return made


def _gradients(case: bench_train.Case, arm: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    with monkeypatch.context() as patch, case.step(bench_train.ARMS[arm]) as step:
        patch.setattr(case.optimizer, "step", lambda: seen.update(case.optimizer.gradients()))
        step()
    case.optimizer.zero_grad()
    return seen


def test_arms_differ_by_quantization_and_by_nothing_else(case, monkeypatch) -> None:
    names = ("bf16", "fp4 qat", "fp4 guided", "fp4 guided, packed weights", "fp4 guided s2")
    plain, qat, guided, packed, congruent = (_gradients(case, arm, monkeypatch) for arm in names)
    assert plain.keys() == qat.keys() == guided.keys()
    # A model that is guided by its own roundings does what it does unguided.
    for name, grad in qat.items():
        assert all(torch.equal(grad, same[name]) for same in (guided, packed, congruent)), name
    assert any(not torch.equal(grad, plain[name]) for name, grad in qat.items())


def test_guided_arms_follow_what_was_recorded(case, monkeypatch) -> None:
    before = _gradients(case, "fp4 guided", monkeypatch)
    for record in case.guidance[bench_train.FULL].values():
        assert len(record.sites) == 4
        for part in record.sites.values():
            part.planes.bitwise_not_()
    after = _gradients(case, "fp4 guided", monkeypatch)
    assert any(not torch.equal(grad, after[name]) for name, grad in before.items())


def test_the_checked_arm_pulls_and_leaves_the_weights(case, monkeypatch) -> None:
    monkeypatch.setattr(bench_train, "NOISE", 0.02)
    before = [p.detach().clone() for p in case.model.parameters()]
    case.prepare(["fp4 checked"])
    assert all(torch.equal(p, old) for p, old in zip(case.model.parameters(), before, strict=True))
    checked = _gradients(case, "fp4 checked", monkeypatch)
    assert case.pulled is not None and 0 < case.pulled.share <= 1
    guided = _gradients(case, "fp4 guided", monkeypatch)
    assert case.pulled is None and any(not torch.equal(grad, checked[name]) for name, grad in guided.items())


def test_a_run_lists_every_arm_and_counts_parameters(monkeypatch) -> None:
    monkeypatch.setitem(bench_train.SHAPES, "small", SMALL)
    monkeypatch.setitem(bench_train.SIZES, "small", (2, 6))
    bench = Bench(CPU, repeats=1)
    bench_train.bench_train(bench, ("small",))
    rows = bench.to_dict()["rows"]
    assert [row["arm"] for row in rows] == list(bench_train.ARMS) and not bench.failures
    assert all(row["value"] > row["bound"] > 0 and "peak" in row["detail"] for row in rows)
    model = bench_train.random_model(SMALL.config(), CPU)
    counted = bench_train.step_bytes(SMALL) / (18 * bench_train.MICRO_BATCHES + 34)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert counted == matrices
