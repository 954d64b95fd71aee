"""The benchmark of the expert products: which rows it has, and in which order they come."""

from __future__ import annotations

import pytest
import torch

from tracefp4.evaluation import bench_experts
from tracefp4.evaluation.bench import Bench
from tracefp4.evaluation.expert_peers import PEERS, Peer, blocks_of_experts


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
    monkeypatch.setattr(bench_experts, "expert_configs", lambda *a: [])
    bench_experts.bench_experts(bench, ("small",), (2,), arms=("bf16", "fp4 nvfp4 w4a4"))
    assert not bench.failures
    names = [row.name for row in bench.rows if row.arm != "bf16"]
    own = ["gate_up", "down", "", "round x", "gate and round"]
    assert names == [f"experts small B2 {part}".strip() for part in own]
    assert {"choice small B2", "route small B2", "weighted sum small B2"} < {row.name for row in bench.rows}


class Pretender:
    """A library that multiplies by nothing, in two ways."""

    def __init__(self, experts, hidden, inter, device):
        self.sizes = experts, hidden, inter

    def works(self, chosen, x):
        assert self.sizes == (2, 64, 64) and x.shape == (len(chosen), 64)
        return [("slowly", lambda: [x + 1 for _ in range(200)]), ("fast", lambda: x)]


def test_peers_are_measured_where_they_are_installed_and_named_where_not(bench, monkeypatch):
    monkeypatch.setitem(PEERS, "there", Peer("json", "python", 4.5, Pretender))
    monkeypatch.setitem(PEERS, "gone", Peer("no_such_module", "no-such-package", 4.5, Pretender))
    monkeypatch.setitem(PEERS, "broken", Peer("json", "python", 4.5, lambda *sizes: [].make))
    bench_experts.bench_experts(bench, ("small",), (2, 3), arms=("there", "gone", "broken"), quick=True)
    assert [(row.name, row.arm) for row in bench.rows] == [(f"experts small B{batch}", "there") for batch in (2, 3)]
    assert all(row.detail.startswith("fast (slowly ") and row.bound for row in bench.rows)
    assert bench.notes == ["gone was left out: no_such_module is not installed (no-such-package has it)"]
    assert len(bench.failures) == 1 and bench.failures[0].startswith("experts small, broken: AttributeError")


@pytest.mark.parametrize("block", [1, 4, 16])
def test_blocks_of_experts(block):
    chosen = bench_experts.draw_experts(13, 8, 3, 1.0, torch.device("cpu"))
    pairs, owners, rows = blocks_of_experts(chosen, 8, block)
    assert rows == len(pairs) == len(owners) * block and {t.dtype for t in (pairs, owners, rows)} == {torch.int32}
    real = pairs < chosen.numel()
    assert sorted(pairs[real].tolist()) == list(range(chosen.numel())) and (pairs[~real] == chosen.numel()).all()
    assert torch.equal(chosen.flatten()[pairs[real].long()], owners.repeat_interleave(block)[real].long())
    assert len(owners) == sum(-(-int(count) // block) for count in chosen.flatten().bincount(minlength=8))
