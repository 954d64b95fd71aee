"""The benchmark of the expert products: which rows it has, and in which order they come."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tracefp4.evaluation import bench_experts, bench_prefill
from tracefp4.evaluation.bench import Bench
from tracefp4.evaluation.expert_peers import PEERS, Peer, blocks_of_experts
from tracefp4.evaluation.fill import fill_kv
from tracefp4.evaluation.peer_check import (
    WORST,
    Packed,
    Way,
    clamped_swiglu,
    deviation,
    pair_in_float64,
    silu_gate,
)
from tracefp4.formats import blocks, e2m1
from tracefp4.formats.numerics import get_numerics


@pytest.fixture
def bench(device, monkeypatch):
    """On whatever runs kernels, with a shape that an interpreter multiplies in no time."""
    monkeypatch.setattr(Bench, "bandwidth", 1e9)
    monkeypatch.setattr(Bench, "product_rate", 1e9)
    monkeypatch.setattr(bench_experts, "need_cuda", lambda bench, case: None)
    monkeypatch.setattr(bench_experts, "SETS", 1)
    monkeypatch.setitem(bench_experts.EXPERTS, "small", (2, 1, 64, 64))
    return Bench(device, repeats=1)


def test_a_quick_run_times_the_default_tiles_of_all_arms_batch_by_batch(bench):
    arms = ("bf16", "fp4 nvfp4 w4a16", "fp4 mxfp4 w4a16")
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
    """A library that multiplies by nothing, in two ways, the second of which returns something else."""

    def __init__(self, experts, hidden, inter, device):
        self.sizes = experts, hidden, inter

    def works(self, chosen, x):
        assert self.sizes == (2, 64, 64) and x.shape == (len(chosen), 64)
        rows = torch.arange(len(x))
        slowly = Way("slowly", lambda: torch.stack([x + 1] * 200)[-1], rows, chosen.flatten())
        return [slowly, Way("fast", lambda: x, rows, chosen.flatten())]

    def expected(self, x, way):
        return (x + 1).double()


def test_peers_are_measured_where_they_are_installed_and_named_where_not(bench, monkeypatch):
    monkeypatch.setitem(PEERS, "there", Peer("json", "python", 4.5, Pretender))
    monkeypatch.setitem(PEERS, "gone", Peer("no_such_module", "no-such-package", 4.5, Pretender))
    monkeypatch.setitem(PEERS, "broken", Peer("json", "python", 4.5, lambda *sizes: [].make))
    bench_experts.bench_experts(bench, ("small",), (2, 3), arms=("there", "gone", "broken"), quick=True)
    assert [(row.name, row.arm) for row in bench.rows] == [(f"experts small B{batch}", "there") for batch in (2, 3)]
    for row in bench.rows:
        assert row.bound and row.detail.startswith("fast, deviates by ") and "(slowly, off by 0." in row.detail
        assert row.numbers["deviation slowly"] < 0.01 < row.numbers["deviation fast"]
    assert bench.notes == ["gone was left out: no_such_module is not installed (no-such-package has it)"]
    assert len(bench.failures) == 1 and bench.failures[0].startswith("experts small, broken: AttributeError")


def test_a_peer_that_cannot_be_checked_is_timed_and_said(bench, monkeypatch):
    monkeypatch.setattr(Pretender, "expected", lambda *a: [].missing)
    monkeypatch.setitem(PEERS, "there", Peer("json", "python", 4.5, Pretender))
    bench_experts.bench_experts(bench, ("small",), (2,), arms=("there",), quick=True)
    assert bench.rows[0].detail.startswith("fast (slowly ") and not bench.rows[0].numbers
    assert [line.split(":")[0] for line in bench.failures] == [
        f"experts small B2, check of {way}, there" for way in ("slowly", "fast")
    ]


@pytest.mark.parametrize("name, mx", [("nvfp4-te", False), ("mxfp4-ceil", True)])
def test_what_a_peer_is_compared_with_is_what_the_codes_stand_for(name, mx):
    weights = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1))
    n = get_numerics(name) if mx else replace(get_numerics(name), scope="tensor")
    q = [blocks.quantize(w, n) for w in weights]
    factor = None if mx else torch.stack([one.decode_scale().flatten()[0] for one in q])
    codes, scales = (torch.stack([getattr(one, part) for one in q]) for part in ("codes", "scales"))
    packed = Packed(e2m1.pack(codes), scales, factor)
    for expert in range(3):
        torch.testing.assert_close(packed.values(expert).float(), q[expert].dequantize(torch.float32))
    made = Packed.random(2, 8, 64, torch.device("cpu"), mx=mx)
    assert made.codes.shape == (2, 8, 32) and made.scales.shape == (2, 8, 2 if mx else 4)
    assert 0.005 < made.values(1).std() < 0.2 and (made.factor is None) == mx


def test_the_pair_in_float64_takes_each_rows_token_and_expert():
    pair = tuple(Packed.random(3, out, inner, torch.device("cpu"), mx=True) for out, inner in ((128, 64), (64, 64)))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    way = Way("any", lambda: x, torch.tensor([3, 0, 3, 1, 2]), torch.tensor([0, 2, 1, 2, 0]))
    for gate in (silu_gate, partial(clamped_swiglu, alpha=1.702, limit=0.5)):
        found = pair_in_float64(x, way, pair, gate)
        for row, token, expert in zip(found, way.tokens.tolist(), way.experts.tolist(), strict=True):
            expected = pair[1].values(expert) @ gate(pair[0].values(expert) @ x[token].double())
            torch.testing.assert_close(row, expected)
    assert deviation(found.bfloat16(), found) < 0.004 and deviation(found[:-1], found) == WORST
    assert deviation(found * float("nan"), found) == WORST and deviation(found.flip(0), found) > 0.5


def test_clamped_swiglu_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = GptOssExperts.__new__(GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    up = 8 * torch.randn(5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(clamped_swiglu(up, 1.702, 7.0), experts._apply_gate(up))


@pytest.mark.parametrize("block", [1, 4, 16])
def test_blocks_of_experts(block):
    chosen = bench_experts.draw_experts(13, 8, 3, 1.0, torch.device("cpu"))
    pairs, owners, rows = blocks_of_experts(chosen, 8, block)
    assert rows == len(pairs) == len(owners) * block and {t.dtype for t in (pairs, owners, rows)} == {torch.int32}
    real = pairs < chosen.numel()
    assert sorted(pairs[real].tolist()) == list(range(chosen.numel())) and (pairs[~real] == chosen.numel()).all()
    assert torch.equal(chosen.flatten()[pairs[real].long()], owners.repeat_interleave(block)[real].long())
    assert len(owners) == sum(-(-int(count) // block) for count in chosen.flatten().bincount(minlength=8))


@pytest.mark.parametrize("chunk, context", [(16, 24), (32, 16)])
def test_attention_of_a_chunk_stands_beside_pytorchs_and_its_operations(bench, monkeypatch, chunk, context):
    monkeypatch.setitem(bench_prefill.ATTENTION, "small", (4, 2, 64))
    monkeypatch.setattr(bench_prefill, "need_cuda", lambda bench, case: None)
    if bench.device.type == "cpu":
        monkeypatch.setattr(bench_prefill, "prefill_configs", lambda: [{"rows": 32, "columns": 16}])
    bench_prefill.bench_prefill_attention(bench, ("small",), (2,), (context,), chunk)
    assert not bench.failures and [row.arm for row in bench.rows] == ["bf16", "fp4 nvfp4", "fp4 mxfp4", "sdpa"]
    chunk = min(chunk, context)
    assert {row.name for row in bench.rows} == {f"prefill attention small B2 {chunk} over {context}"}
    seen = sum(context - chunk + i + 1 for i in range(chunk))  # pairs of a query and a token, of a head and sequence
    assert all(row.bound == pytest.approx(1e6 * 2 * 4 * 4 * 64 * seen / 1e9) for row in bench.rows)


def test_pools_are_filled_with_numbers_as_a_model_has_them(device):
    from tracefp4.formats.fused import rules
    from tracefp4.formats.numerics import get_numerics
    from tracefp4.kernels.kv_append import pool_tensors

    for name in (None, "sglang-kv-nvfp4", "mxfp4-ceil"):
        made = None if name is None else rules(get_numerics(name))
        kv = pool_tensors(8, 2, 64, made, device)
        fill_kv(kv, made)
        assert (kv.codes.unflatten(1, (4, -1)) != 0).any(-1).all()
        assert kv.scales is None or (kv.scales > 0).all()
