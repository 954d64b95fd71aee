"""The benchmark of the expert products: which rows it has, and in which order they come."""

from __future__ import annotations

import pytest

from tracefp4.evaluation import bench_experts
from tracefp4.evaluation.bench import Bench


@pytest.fixture
def bench(device, monkeypatch):
    """On whatever runs kernels, with a shape that an interpreter multiplies in no time."""
    monkeypatch.setattr(Bench, "bandwidth", 1e9)
    monkeypatch.setattr(bench_experts, "need_cuda", lambda bench, case: None)
    monkeypatch.setattr(bench_experts, "SETS", 1)
    monkeypatch.setitem(bench_experts.EXPERTS, "small", (2, 1, 64, 64))
    return Bench(device, repeats=1)


def test_a_quick_run_times_the_default_tiles_of_all_arms_batch_by_batch(bench):
    arms = ("bf16", "fp4 nvfp4 w4a16")
    bench_experts.bench_experts(bench, ("small",), (1, 3), arms=arms, quick=True)
    assert not bench.failures
    assert [(row.name, row.arm) for row in bench.rows] == [
        (f"experts small B{batch}", arm) for batch in (1, 3) for arm in arms
    ]
    assert all(row.detail == "default tiles" and row.bound for row in bench.rows)


def test_a_whole_run_also_times_tiles_and_small_kernels(bench, monkeypatch):
    monkeypatch.setattr(bench_experts, "_expert_configs", lambda *a: [])
    bench_experts.bench_experts(bench, ("small",), (2,), arms=("bf16", "fp4 nvfp4 w4a4"))
    assert not bench.failures
    names = [row.name for row in bench.rows if row.arm != "bf16"]
    own = ["gate_up", "down", "", "round x", "gate and round"]
    assert names == [f"experts small B2 {part}".strip() for part in own]
    assert {"choice small B2", "route small B2", "weighted sum small B2"} < {row.name for row in bench.rows}
