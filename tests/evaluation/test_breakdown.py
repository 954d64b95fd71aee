"""A decode step taken apart: each part's step differs in that part alone, and the parts are their differences."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import EngineError
from tracefp4.evaluation.breakdown import PARTS, breakdown
from tracefp4.evaluation.steps import Step, Steps, in_turn, more
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine


def engine_of(family="qwen3_moe", spec="nvfp4-w4a4-kv4", plan=None, device="cpu"):
    """A warm engine on a tiny model."""
    model = tiny_model(family, seed=3, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    chosen = None if plan is None else Plan.parse(plan)
    engine = EmbeddedEngine(
        model, None, get_spec(spec), chosen, MemoryStore(), max_tokens=256, page_size=4, max_batch=4
    )
    engine.generate([Request("warm", tuple(range(1, 9)), 1, SamplingParams(max_new_tokens=2, seed=0))])
    return engine


def test_a_step_records_into_its_own_record_and_stores_into_its_own_pool(device):
    engine = engine_of(plan="r1-all/s8", device=device.type)
    steps = Steps(engine, 3, 10)
    sites, kept = engine._runner.sites, engine.capture._rows.clone()
    recorded, dense = steps.step(Plan.parse("r4-all+mid/s8")), steps.step(dense=True)
    pool = [tensor.clone() for tensor in engine.pool._tensors()]
    assert all(value > 0 for value in dense.seconds(2))
    assert all(torch.equal(a, b) for a, b in zip(pool, engine.pool._tensors(), strict=True))
    slots = [3 * i * 4 + 9 for i in range(3)]  # three pages each, the tenth token
    assert dense.pool.numerics is None and all(dense.pool._stack.codes[:, slot].any() for slot in slots)
    recorded.seconds(1)
    assert torch.equal(engine.capture._rows, kept) and (sites.pool, sites.capture) == (engine.pool, engine.capture)
    # A graph is made for a batch of 4; its fourth row fills it up and writes where no sequence has a page.
    padded = engine._runner.graphs is not None and engine._runner.graphs.padded(3) > 3
    assert _written(recorded) == slots + [engine.pages.padding_page * engine.pages.page_size] * padded
    tickets = [rows.tickets for rows in recorded.capture.read(torch.tensor(slots, device=device)) if rows is not None]
    assert len(tickets) == 2 and all((found == 1).all() for found in tickets)


def test_a_padding_row_writes_to_the_padding_page_alone_and_bears_no_ticket():
    """What a graph does that is replayed for fewer sequences than it has rows, without a graph."""
    engine = engine_of(plan="r1-all/s8")
    steps = Steps(engine, 3, 10)
    recorded = steps.step(Plan.parse("r4-all+mid/s8"))
    inputs = engine._runner.inputs.fill(recorded.rows, 4, recorded.width)
    with torch.no_grad(), recorded._serving():
        engine._runner.decode_step(inputs, False)
    padding = engine.pages.padding_page * engine.pages.page_size
    assert padding == 256 and _written(recorded) == [9, 21, 33, padding]
    assert recorded.capture.stamps(torch.tensor([33, padding])).tolist() == [1, 0]
    found = [rows.tickets for rows in recorded.capture.read(torch.tensor([33, padding])) if rows is not None]
    assert all((tickets[:, 0] == 1).all() and (tickets[:, 1] == 0).all() for tickets in found)


def _written(step):
    """Slots whose rows of the step's record are not as they were made."""
    return step.capture._rows.any(dim=1).nonzero().flatten().tolist()


def test_the_parts_are_differences_of_steps_and_what_their_rows_cost_at_the_end(monkeypatch):
    seconds, gathered = {"dense": 10.0, "plain": 9.0, "recorded": 9.5}, []

    def name(step):
        return "dense" if step.pool.numerics is None else "recorded" if step.capture.table.shapes else "plain"

    monkeypatch.setattr(Step, "seconds", lambda self, repeats=1: [seconds[name(self)]] * repeats)
    monkeypatch.setattr(Steps, "gathering", lambda self, plan, repeats: gathered.append(plan) or 0.25)
    monkeypatch.setattr(Steps, "framing", lambda self, plan, repeats: 0.5)
    found = breakdown(Steps(engine_of(), 2, 8), Plan.parse("r1-l1+mid"))
    assert found.seconds == dict(zip(PARTS, (10.0, -1.0, 0.75, 0.25, 0.5), strict=True))
    assert found.shares["kv_dequantization"] == 0 and found.shares["forward"] == 10 / 11.5
    assert [str(plan) for plan in gathered] == ["r1-l1:experts+mid", "r1-l1:k+v"]
    assert found.to_dict() | {"seconds": 0, "shares": 0} == {
        "plan": "r1-l1+mid", "batch": 2, "context": 8, "seconds": 0, "shares": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "family, spec, plan, zero",
    [
        ("qwen3_5_moe", "nvfp4-w4a4-kv4", "r1-all/s3", ()),
        ("deepseek_v3", "nvfp4-w4a4-kv4", "c1-all+mid/s2", ()),
        ("qwen3_moe", "nvfp4-w4a4", "r1-all/s8", ("kv_dequantization", "kv_guidance")),
        ("qwen3_moe", "nvfp4-kv4", "r1-all:kv/s8", ("wa_guidance",)),
        ("qwen3_moe", "bf16", None, ("kv_dequantization", "wa_guidance", "kv_guidance", "frames")),
    ],
)
def test_every_engine_can_be_taken_apart(family, spec, plan, zero):
    found = breakdown(Steps(engine_of(family, spec), 3, 9), None if plan is None else Plan.parse(plan), 1)
    assert found.seconds["forward"] > 0
    assert [part for part in PARTS if found.seconds[part] == 0] == list(zero)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_the_record_costs_what_was_put_into_it(clock, monkeypatch):
    """A recorder that sleeps is found in the part of the experts' guidance, and nowhere else."""
    monkeypatch.setattr("tracefp4.evaluation.steps.time", clock)
    steps = Steps(engine_of(), 2, 8)
    plan = Plan.parse("r1-all:experts/s8")
    plain, recorded = steps.step(), steps.step(plan)
    write = recorded.capture.write
    recorded.capture.write = lambda *args: clock.sleep(0.05) or write(*args)
    without, with_it = in_turn([plain, recorded], 1, rounds=3)
    layers = len(steps.engine.layout.moe_layers)
    assert 0.03 * layers < more(with_it, without) < 0.1 * layers


def test_steps_need_pages_and_an_engine_at_rest():
    engine = engine_of()
    with pytest.raises(EngineError, match="at most 21 fit"):
        Steps(engine, 22, 12)
    engine.add(Request("a", (1, 2), 1, SamplingParams(max_new_tokens=2, seed=0)))
    with pytest.raises(EngineError, match="in flight"):
        Steps(engine, 1, 4)
