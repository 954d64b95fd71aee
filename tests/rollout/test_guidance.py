"""What is shipped with a rollout: rows, validity, sharing, and the pool as the record of K and V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tracefp4.core import KV_KINDS, Kind
from tracefp4.errors import EngineError
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized, quantize
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.codec import code_checks, scale_checks, unpack_bits
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.frame import Expectation, decode
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import restrict
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.admission import stored_plan
from tracefp4.rollout.embedded import EmbeddedEngine


def assert_rows_equal(one, other, rows: int) -> None:
    """The first ``rows`` rows of two records hold the same bytes."""
    for site, part in one.sites.items():
        for name in ("planes", "scales", "global_scale"):
            a, b = getattr(part, name), getattr(other.sites[site], name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a[:rows], b[:rows]), f"{site} {name}"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("length", [8, 11])
def test_samples_share_the_guidance_of_their_prompt(make_bench, make_request, family, length):
    bench = make_bench(family, max_batch=2)  # the third sample starts when the first two are gone
    rollouts = bench.engine.generate([make_request("a", length, samples=3)])
    records = [bench.record(r) for r in rollouts]
    assert len({r.response_ids for r in rollouts}) == 3
    for rollout, record in zip(rollouts, records, strict=True):
        assert record.valid.all() and record.rows == rollout.rows
        assert_rows_equal(records[0], record, length)
        assert torch.equal(rollout.routes[:length], rollouts[0].routes[:length])


def test_recorded_codes_are_those_in_the_pool(make_bench, make_request):
    bench = make_bench()
    engine = bench.engine
    engine.add(make_request("a", 9, max_new_tokens=6))
    stored = {}
    while engine.busy:
        running = engine.scheduler.running
        slots = torch.tensor(engine.pages.slots(running[0].pages, 0, running[0].length - 1)) if running else None
        if slots is not None:
            stored = {
                (layer, kind): tuple(part[0] for part in engine.pool.stored([layer], kind, slots))
                for layer in engine.layout.kv_layers
                for kind in (Kind.K, Kind.V)
            }
        finished = engine.step()
    record = bench.record(finished[0])
    for (layer, kind), (codes, scales) in stored.items():
        part = next(p for site, p in record.sites.items() if (site.layer, site.kind) == (layer, kind))
        rows = len(codes)
        assert rows == record.rows - 1  # the last step's row came after the snapshot
        found = unpack_bits(part.planes, 4, part.shape.width)[:rows]
        assert torch.equal(found, e2m1.unpack(codes)) and torch.equal(part.scales[:rows], scales)
        # Quantizing what the pool holds again gives the same codes: nothing was rounded twice.
        numerics = bench.reference.spec.kv
        again = quantize(Quantized(found, scales, None, numerics).dequantize(), numerics)
        assert torch.equal(again.dequantize(), Quantized(found, scales, None, numerics).dequantize())


@pytest.mark.parametrize(
    "plan", ["r1-all+mid/s8", "r2-l1+mid/s3", "r1-all:kv/s2", "r3-l1:experts", "r1-l2:mid/s3", "c1-all+mid/s2"]
)
def test_a_plan_records_what_a_larger_one_can_be_cut_to(make_bench, make_request, plan):
    requests = [make_request("a", 9, samples=2, max_new_tokens=10)]
    whole, part = make_bench(plan="r4-all+mid/s8"), make_bench(plan=plan)
    layout, spec = whole.reference.layout, whole.reference.spec
    for full, small in zip(whole.engine.generate(requests), part.engine.generate(requests), strict=True):
        assert full.response_ids == small.response_ids
        expected = restrict(whole.record(full), Plan.parse(plan), layout.site_shapes(spec), layout.num_layers)
        found = part.record(small)
        assert found.plan == plan and found.sites.keys() == expected.sites.keys()
        assert_rows_equal(expected, found, found.rows)
        for site, record in found.sites.items():
            for name in ("checks", "code_checks"):
                checks = getattr(expected.sites[site], name)
                assert (getattr(record, name) is None) == (checks is None)
                assert checks is None or torch.equal(getattr(record, name), checks)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_bits_of_a_checked_plan_stay_with_the_engine_until_they_are_pulled(make_bench, make_request, family):
    requests = [make_request("a", 9, samples=2, max_new_tokens=10), make_request("b", 3)]
    sent, checked = make_bench(family, plan="r2-all+mid/s2"), make_bench(family, plan="c2-all+mid/s2")
    assert checked.engine.plan.checked
    rollouts = checked.engine.generate(requests)
    for rollout, other in zip(rollouts, sent.engine.generate(requests), strict=True):
        assert rollout.response_ids == other.response_ids and rollout.guidance.nbytes < other.guidance.nbytes
        record = checked.record(rollout)
        for site, part in sent.record(other).sites.items():
            rows = np.arange(0, record.rows, 3)
            (found,) = checked.store.pull(site, [(rollout.guidance, rows)])
            bits = torch.from_numpy(found)
            assert torch.equal(bits, part.planes[rows])
            assert torch.equal(code_checks(bits.flatten(1)), record.sites[site].code_checks[rows])
            assert not record.sites[site].planes.numel()


def test_a_checked_plan_needs_an_engine_and_a_store_that_serve_pulls(tmp_path):
    plan, model = Plan.parse("c1-all+mid/s2"), tiny_model("qwen3_moe")
    with (
        FileStore(tmp_path) as files,
        pytest.raises(
            EngineError, match="plan 'c1-all\\+mid/s2' leaves bits with the engine .* 'r1-all\\+mid/s2' sends"
        ),
    ):
        EmbeddedEngine(model, None, get_spec("nvfp4-w4a4-kv4"), plan, files)
    # Other engines do not say that they answer.
    with pytest.raises(EngineError, match="takes the embedded engine"):
        stored_plan(plan, MemoryStore())
    assert stored_plan(plan, LateStore(MemoryStore()), serves_pulls=True) == plan


def test_a_frame_meets_the_expectation_of_its_trainer(make_bench, make_request):
    bench = make_bench(plan="r1-all+mid/s3")
    bench.engine.sync(dict(bench.reference.model.named_parameters()), 4)
    (rollout,) = bench.engine.generate([make_request("a", 9)])
    layout, spec = bench.reference.layout, bench.reference.spec
    expect = Expectation(
        tokens=rollout.tokens,
        numerics_hash=spec.hash,
        plan="r1-all+mid/s3",
        shapes=layout.site_shapes(spec),
        weight_version=4,
    )
    data = bench.store.get(rollout.guidance)
    assert decode(data, expect).rows == rollout.rows and rollout.weight_version == 4
    assert rollout.guidance.nbytes == len(data) == bench.engine.stats.guidance_bytes


def test_rows_that_nobody_wrote_are_marked(make_bench, make_request):
    bench = make_bench(plan="r1-all+mid/s3")
    engine = bench.engine
    engine.add(make_request("a", 9))
    engine.step()
    pages = engine.scheduler.running[0].pages
    forwarded, lost = engine.pages.slots(pages, 2, 3)[0], engine.pages.slots(pages, 5, 6)[0]
    engine.capture._forwarded[forwarded] = 0
    engine.capture._rows[lost] = 0
    finished = []
    while engine.busy:
        finished += engine.step()
    record = bench.record(finished[0])
    assert (~record.valid).nonzero().flatten().tolist() == [2, 5]
    assert engine.stats.invalid_rows == 2
    # Checks count valid rows only, so a reader that leaves the others out agrees.
    site, part = next((s, p) for s, p in record.sites.items() if s.kind not in KV_KINDS)
    full = make_bench(plan="r4-all+mid/s8")
    (same,) = full.engine.generate([make_request("a", 9)])
    scales = full.record(same).sites[site].scales
    assert torch.equal(part.checks, scale_checks(scales.flatten(1), record.valid))


def test_guidance_is_shipped_only_when_asked_for(make_bench, make_request):
    bench = make_bench()
    (without,) = bench.engine.generate([make_request("a", 5)], guidance=False)
    assert without.guidance is None and without.routes is not None and bench.store.keys() == ()
    bench.engine.add(make_request("a", 5), guidance=False)
    bench.engine.add(make_request("b", 5))
    finished = []
    while bench.engine.busy:
        finished += bench.engine.step()
    assert {r.request_id: r.guidance is not None for r in finished} == {"a": False, "b": True}


def test_one_id_may_be_sampled_again(make_bench, make_request):
    bench = make_bench()
    handles = [bench.engine.generate([replace(make_request("a b/c", 5), samples=2)])[1].guidance for _ in range(2)]
    assert len(bench.store.keys()) == 4 and handles[0] != handles[1]
