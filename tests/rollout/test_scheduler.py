"""Admission, order, retraction and accounting, without a model."""

from __future__ import annotations

import random

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.pool import PageAllocator
from tracefp4.rollout.request import Sequence
from tracefp4.rollout.scheduler import Scheduler
from tracefp4.rollout.state import StatePool


@pytest.fixture(scope="module")
def layouts() -> dict[str, ModelLayout]:
    return {family: describe(tiny_model(family)) for family in ("qwen3_moe", "qwen3_next")}


def build(layout: ModelLayout, *, pages: int = 16, size: int = 4, batch: int = 4, chunk: int = 8) -> Scheduler:
    return Scheduler(PageAllocator(pages, size), StatePool(layout, batch + 8), batch, chunk)


def members(name: str, arrival: int, prompt: int, samples: int = 1, new: int = 6) -> list[Sequence]:
    request = Request(name, tuple(range(prompt)), samples, SamplingParams(max_new_tokens=new))
    return [Sequence(request, sample, arrival, 0, False) for sample in range(samples)]


def step(scheduler: Scheduler) -> list[Sequence]:
    """What the engine does in a step, with made-up tokens; returns the sequences that ended."""
    ended = []

    def take(sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.append(1, 0.0)
            if len(sequence.response) >= sequence.request.sampling.max_new_tokens:
                ended.append(sequence)
                scheduler.leave(sequence)
                scheduler.finish(sequence)

    chunks = scheduler.prefill()
    assert sum(c.stop - c.start for c in chunks) <= scheduler.prefill_chunk
    for chunk in chunks:
        assert chunk.start == chunk.prefix.done
        chunk.prefix.done = chunk.stop
        if chunk.stop == len(chunk.prefix.tokens):
            chunk.prefix.hidden = torch.zeros(1)
    take([start.sequence for start in scheduler.start()])
    take(scheduler.decode())
    return ended


def check_accounting(scheduler: Scheduler) -> None:
    owners = [*scheduler.running, *scheduler.resident]
    owned = {page for owner in owners for page in owner.pages}
    assert scheduler.pages.free == scheduler.pages.num_pages - len(owned)
    assert len(scheduler.running) <= scheduler.max_batch
    assert not any(p.pages for p in scheduler.waiting)
    if scheduler.states.needed:
        rows = [owner.state_row for owner in owners]
        assert len(set(rows)) == len(rows) and scheduler.states.free == scheduler.states.rows - len(rows)


def test_a_long_prompt_is_prefilled_in_chunks(layouts):
    scheduler = build(layouts["qwen3_moe"])
    scheduler.add(members("a", 0, 19))
    spans = []
    for _ in range(3):
        (chunk,) = scheduler.prefill()
        spans.append((chunk.start, chunk.stop))
        chunk.prefix.done = chunk.stop
    assert spans == [(0, 8), (8, 16), (16, 19)]


def test_admission_is_first_come_first_served(layouts):
    scheduler = build(layouts["qwen3_moe"], pages=6)
    scheduler.add(members("big", 0, 20))
    scheduler.add(members("huge", 1, 16))
    scheduler.add(members("small", 2, 3))
    scheduler.prefill()
    # The small one would fit, but the one before it does not.
    assert [p.members[0].request.id for p in scheduler.resident] == ["big"]
    assert [p.members[0].request.id for p in scheduler.waiting] == ["huge", "small"]


def test_sequences_that_wait_are_admitted_several_at_a_time(layouts):
    scheduler = build(layouts["qwen3_moe"], pages=400, batch=16, chunk=64)
    for i in range(60):
        scheduler.add(members(f"r{i}", i, 3, new=3 + i % 7))
    ended, admitted = [], []
    while scheduler.busy:
        told, waited = scheduler.has_prefill, len(scheduler.waiting)
        ended += step(scheduler)
        admitted.append(waited - len(scheduler.waiting))
        assert told or not admitted[-1]
        assert admitted[-1] != 1 or waited == 1  # an eighth of the batch, or all that wait
        check_accounting(scheduler)
    assert len(ended) == 60 and sum(admitted) == 60 and max(admitted) == 16


def test_few_that_wait_do_not_wait_for_more_places_than_they_need(layouts):
    scheduler = build(layouts["qwen3_moe"], pages=400, batch=16, chunk=64)
    for i in range(15):
        scheduler.add(members(f"r{i}", i, 3, new=5))
    step(scheduler)
    scheduler.add(members("late", 99, 3, new=5))
    assert scheduler.has_prefill
    step(scheduler)
    assert len(scheduler.running) == 16 and not scheduler.waiting


def test_samples_share_full_pages_and_copy_the_last(layouts):
    scheduler = build(layouts["qwen3_next"])
    scheduler.add(members("a", 0, 6, samples=3))
    (chunk,) = scheduler.prefill()
    chunk.prefix.done, chunk.prefix.hidden = 6, torch.zeros(1)
    first, second, last = scheduler.start()
    assert first.sequence.pages[0] == second.sequence.pages[0] == last.sequence.pages[0]
    assert len({s.sequence.pages[1] for s in (first, second, last)}) == 3
    assert first.page == (last.sequence.pages[1], first.sequence.pages[1]) and last.page is None and last.inherits
    assert first.row == (last.sequence.state_row, first.sequence.state_row) and last.row is None
    check_accounting(scheduler)


def test_the_youngest_gives_way_and_comes_back_in_its_place(layouts):
    scheduler = build(layouts["qwen3_moe"], pages=4, size=2, batch=2)
    scheduler.add(members("old", 0, 2, new=6))
    scheduler.add(members("young", 1, 2, new=6))
    scheduler.add(members("later", 2, 2, new=6))
    done = []
    for _ in range(60):
        done += step(scheduler)
        check_accounting(scheduler)
    assert [s.request.id for s in done] == ["old", "young", "later"]
    assert scheduler.retractions > 0 and not scheduler.busy and scheduler.pages.free == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_end_and_leave_nothing(layouts, family, seed):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    scheduler = build(
        layouts[family], pages=24 // size, size=size, batch=rng.choice([1, 3, 5]), chunk=rng.choice([1, 5, 32])
    )
    expected, aborted, ended, arrival = set(), set(), [], 0
    for _ in range(400):
        if arrival < 12 and rng.random() < 0.5:
            name, samples = f"r{arrival}", rng.randint(1, 4)
            # Room for the longest sequence and one copied page, as the engine checks.
            group = members(name, arrival, rng.randint(1, 12), samples, new=rng.randint(1, 8))
            scheduler.add(group)
            expected |= {(name, s) for s in range(samples)}
            arrival += 1
        elif rng.random() < 0.03 and scheduler.request_ids():
            name = rng.choice(sorted(scheduler.request_ids()))
            aborted |= {(name, s.sample) for s in scheduler.abort(name)}
        ended += [(s.request.id, s.sample) for s in step(scheduler)]
        check_accounting(scheduler)
    while scheduler.busy:
        ended += [(s.request.id, s.sample) for s in step(scheduler)]
    assert sorted(ended) == sorted(expected - aborted)
    assert scheduler.pages.free == scheduler.pages.num_pages
    assert scheduler.states.free == scheduler.states.rows
