"""Sequences that ended leave while others decode: nobody waits for their copies, and their bytes are what they were."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import NonFiniteError, SyncError
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.ring import Ring
from tracefp4.rollout import harvest
from tracefp4.rollout.loop import HOLD_STEPS

PLAN = "r1-all+mid/s3"


class Arrival:
    """A copy that takes some looks of whoever asks, or until somebody waits."""

    def __init__(self, copies, looks, waits):
        self.copies, self.looks, self.waits = copies, looks, waits

    def query(self):
        self.looks -= 1
        if self.looks == 0:
            self._arrive()
        return self.looks <= 0

    def synchronize(self):
        if self.looks > 0:
            self.looks = 0
            self.waits.append(self)
            self._arrive()

    def _arrive(self):
        for target, part in self.copies:
            target.copy_(part)


@pytest.fixture
def slow_copies(monkeypatch):
    """Copies that arrive at the given look; what was waited for before it came."""
    waits: list[Arrival] = []

    def slow(looks: int) -> list[Arrival]:
        monkeypatch.setattr(
            Ring, "_copy", lambda self, targets, parts: Arrival(list(zip(targets, parts, strict=True)), looks, waits)
        )
        return waits

    return slow


def frames(bench, rollouts) -> dict:
    return {(r.request_id, r.sample): bytes(bench.store.get(r.guidance)) for r in rollouts}


def assert_same(bench, found, other_bench, expected) -> None:
    """The same rollouts, whatever their order, and the same bytes of guidance."""
    found, expected = (sorted(rollouts, key=lambda r: (r.request_id, r.sample)) for rollouts in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids == other.response_ids and one.finish_reason == other.finish_reason
        assert torch.equal(one.routes, other.routes)
    assert frames(bench, found) == frames(other_bench, expected)


def requests_of(make_request):
    """They end one by one, the last one long after the others."""
    lengths = {"a": 3, "b": 5, "c": 12, "d": HOLD_STEPS + 30}
    return [make_request(name, 4, samples=2, max_new_tokens=new) for name, new in lengths.items()]


@pytest.mark.parametrize("plan", [PLAN, "c1-all+mid/s2"])
def test_nobody_waits_while_others_decode(make_bench, make_request, slow_copies, plan):
    requests = requests_of(make_request)
    plain = make_bench(plan=plan, max_tokens=1024)
    expected = plain.engine.generate(requests)
    waits = slow_copies(4)
    bench = make_bench(plan=plan, max_tokens=1024)
    engine, came, found = bench.engine, [], []
    for request in requests:
        engine.add(request)
    for number in range(1, 200):
        finished = engine.step()
        came += [number] * len(finished)
        found += finished
        assert not waits or not engine._loop.busy
        if not engine.busy:
            break
    # Gathered in step 18, asked for once a step from then on; the last ones were waited for in their own step.
    assert came == [2 + HOLD_STEPS + 3] * 6 + [HOLD_STEPS + 29] * 2
    assert len(waits) == 1 and engine.pages.free == engine.pages.num_pages
    assert_same(bench, found, plain, expected)


def test_pages_are_free_before_rows_have_arrived(make_bench, make_request, slow_copies):
    slow_copies(100)
    engine = make_bench(max_tokens=1024).engine
    engine.add(make_request("a", 4, max_new_tokens=3))
    engine.add(make_request("b", 4, max_new_tokens=60))
    owned = []
    while engine.step() == []:
        owned.append(engine.pages.num_pages - engine.pages.free)
    # Only those of "b" are left, which go on growing, long before "a" comes with it in the end.
    assert owned[2 + HOLD_STEPS] < owned[HOLD_STEPS] and len(owned) == 58 and not engine.busy


def test_a_request_can_be_given_up_while_its_rows_are_on_their_way(make_bench, make_request, slow_copies):
    requests = requests_of(make_request)
    plain = make_bench(plan=PLAN, max_tokens=1024)
    expected = plain.engine.generate(requests)
    slow_copies(10)
    bench = make_bench(plan=PLAN, max_tokens=1024)
    engine, found = bench.engine, []
    for request in requests:
        engine.add(request)
    for _ in range(2 + HOLD_STEPS):
        assert engine.step() == []
    assert engine._harvester.request_ids == {"a", "b", "c"} and engine.scheduler.request_ids() == {"d"}
    with pytest.raises(SyncError, match="4 requests are in flight"):
        engine.sync({}, 1)
    dropped = engine.abort("b")
    assert [r.sample for r in dropped] == [0, 1] and {r.finish_reason for r in dropped} == {"length"}
    assert all(r.guidance is None and r.routes is None and len(r.response_ids) == 5 for r in dropped)
    engine.add(make_request("b", 4, max_new_tokens=2))  # its id is free again
    while engine.busy:
        found += engine.step()
    (again,) = [r for r in found if r.request_id == "b"]
    found.remove(again)
    assert engine.stats.aborted == 2 and len(again.response_ids) == 2
    assert_same(bench, found, plain, [r for r in expected if r.request_id != "b"])
    assert len(bench.store.keys()) == len(found) + 1


def test_what_is_on_its_way_is_left_when_all_else_is_given_up(make_bench, make_request, slow_copies):
    waits = slow_copies(100)
    bench = make_bench(max_tokens=1024)
    engine = bench.engine
    engine.add(make_request("a", 4, max_new_tokens=3))
    engine.add(make_request("b", 4, max_new_tokens=60))
    for _ in range(2 + HOLD_STEPS):
        assert engine.step() == []
    engine.abort("b")
    assert engine.busy and not engine._loop.busy
    (rollout,) = engine.step()  # nothing else is left to do, so it waits
    assert rollout.request_id == "a" and bench.record(rollout).valid.all() and len(waits) == 1
    assert not engine.busy


def test_an_error_leaves_nothing_on_its_way(make_bench, make_request, slow_copies):
    slow_copies(100)
    bench = make_bench(max_tokens=1024)
    engine = bench.engine
    engine.add(make_request("a", 4, max_new_tokens=3))
    engine.add(make_request("b", 4, max_new_tokens=60))
    for _ in range(2 + HOLD_STEPS):
        assert engine.step() == []
    engine.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        engine.step()
        engine.step()
    assert not engine.busy and not engine._harvester.request_ids and bench.store.keys() == ()
    assert engine.pages.free == engine.pages.num_pages


@pytest.mark.parametrize("plan", [PLAN, "c2-all+mid/s2"])
@pytest.mark.parametrize("rows", [16, 48, 200])
@pytest.mark.parametrize("looks", [0, 3])
def test_a_small_ring_changes_no_byte(make_bench, make_request, slow_copies, monkeypatch, plan, rows, looks):
    """Rings of a chunk, which no sequence fits into, of a few sequences, and of a part of what waits to be claimed."""
    requests = [make_request(n, 9 + i, samples=3, max_new_tokens=8 + 2 * i) for i, n in enumerate("abcdefgh")]
    plain = make_bench(plan=plan)
    expected = plain.engine.generate(requests)
    chunk = harvest._chunk_bytes(plain.engine.capture, plain.engine.plan)
    assert plain.engine._harvester.ring.nbytes == chunk * 512 // 16
    monkeypatch.setattr(harvest, "RING_BYTES", rows // 16 * chunk)
    if looks:
        slow_copies(looks)
    bench = make_bench(plan=plan)
    bench.store = LateStore(MemoryStore())  # frames keep their places until they are claimed
    harvester = bench.engine._harvester
    harvester.store = bench.store
    found = bench.engine.generate(requests)
    assert harvester.ring.nbytes == rows // 16 * chunk
    assert sum(place.stop - place.start for place in harvester.ring._places) <= harvester.ring.nbytes
    assert_same(bench, found, plain, expected)
    for one, other in zip(found, expected, strict=True) if plain.engine.plan.checked else ():
        for site in plain.record(other).sites:
            pulls = [
                b.store.pull(site, [(r.guidance, torch.arange(5).numpy())]) for b, r in ((bench, one), (plain, other))
            ]
            assert (pulls[0][0] == pulls[1][0]).all()


def test_the_ring_is_as_large_as_what_may_lie_in_it(make_bench, monkeypatch):
    for plan, rows in ((PLAN, 4096), (None, 4096)):
        harvester = make_bench(plan=plan, max_tokens=4096).engine._harvester
        assert harvester.ring.nbytes == rows // 16 * harvest._chunk_bytes(harvester.capture, harvester.plan)
        assert harvester.ring._memory is None
    monkeypatch.setattr(harvest, "ROWS_AT_ONCE", 64)
    harvester = make_bench(plan=None, max_tokens=4096).engine._harvester
    assert harvester.ring.nbytes == 2 * 64 * 2 * 2 and harvester.plan is None  # two layers, two experts a token


def test_rows_that_wait_on_the_device_are_bounded(make_bench, make_request, slow_copies, monkeypatch):
    monkeypatch.setattr(harvest, "ROWS_AT_ONCE", 32)
    waits = slow_copies(10_000)
    bench, plain = (make_bench(plan=PLAN, max_tokens=2048) for _ in range(2))
    for request in requests_of(make_request):
        bench.engine.add(request)
    found, most = [], 0
    while bench.engine.busy:
        found += bench.engine.step()
        flights = bench.engine._harvester._flights
        most = max(most, sum(flight.rows for flight in flights if flight.parcel._arrival is not None))
    assert 32 < most <= 64 and waits
    monkeypatch.undo()
    assert_same(bench, found, plain, plain.engine.generate(requests_of(make_request)))
