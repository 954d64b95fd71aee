"""What is sent through the ring arrives as it was, whatever becomes of the memory that it came through."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from tracefp4.errors import GuidanceError
from tracefp4.guidance import ring as ring_module
from tracefp4.guidance.ring import Parcel, Ring, parcel_bytes

CPU = torch.device("cpu")


class Arrival:
    """Copies when it is waited for; until then what was sent is not there."""

    def __init__(self, copies: list[tuple[Tensor, Tensor]], log: list[Arrival]) -> None:
        self.copies, self.log = copies, log
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        for target, part in self.copies if not self.done else ():
            target.copy_(part)
        self.done = True
        self.log.append(self)


class SlowRing(Ring):
    """A ring whose copies take until somebody waits."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, CPU)
        self.waits: list[Arrival] = []

    def _copy(self, targets, parts):
        return Arrival(list(zip(targets, parts, strict=True)), self.waits)


def parts(seed: int, device: torch.device = CPU, rows: int = 16) -> list[Tensor]:
    """Tensors of several dtypes, one of them empty."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * 17,), dtype=torch.uint8, generator=g)
    routes = torch.randint(0, 999, (rows, 3, 2), dtype=torch.int16, generator=g)
    made = [data, torch.rand(rows, generator=g) < 0.5, torch.empty(2, 0, 4, dtype=torch.uint8), routes]
    return [part.to(device) for part in made]


def same(found: tuple[Tensor, ...], expected: list[Tensor]) -> bool:
    return all(
        a.device == CPU and a.dtype is b.dtype and torch.equal(a, b.cpu())
        for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


def lies_in(ring: Ring, parcel: Parcel) -> bool:
    """Whether a parcel lies in the ring's memory."""
    memory = ring._allocated()
    first = parcel._tensors[0].data_ptr()
    return memory.data_ptr() <= first < memory.data_ptr() + memory.numel()


def test_parcels_arrive_as_they_were_sent(device) -> None:
    ring = Ring(1 << 14, device)
    assert ring.send([]).open() == ()
    sent = [(parts(seed, device), seed) for seed in range(5)]
    found = [ring.send(tensors) for tensors, _ in sent]
    for parcel, (tensors, _) in zip(found, sent, strict=True):
        assert same(parcel.open(), tensors) and parcel.arrived and lies_in(ring, parcel)
        assert all(part.data_ptr() % 64 == 0 for part in parcel.open() if part.numel())


def test_the_memory_of_those_that_are_gone_is_used_again(device) -> None:
    ring, size = Ring(4 * parcel_bytes(parts(0)), device), parcel_bytes(parts(0))
    places = []
    for seed in range(50):
        parcel = ring.send(parts(seed, device))
        assert same(parcel.open(), parts(seed))
        places.append(parcel.open()[0].data_ptr() - ring._allocated().data_ptr())
    # The one before is alive until the name is given to the next, so two places take turns.
    assert set(places) <= {0, size, 2 * size, 3 * size} and len(ring._places) <= 2


def test_a_full_ring_moves_the_oldest_out_and_waits_for_nobody_else() -> None:
    ring = SlowRing(3 * parcel_bytes(parts(0)) + 64)
    kept = [ring.send(parts(seed)) for seed in range(3)]
    assert not ring.waits and not any(parcel.arrived for parcel in kept)
    kept += [ring.send(parts(seed)) for seed in (3, 4)]
    assert [wait.done for wait in ring.waits] == [True, True]
    assert [parcel.arrived for parcel in kept] == [True, True, False, False, False]
    assert [lies_in(ring, parcel) for parcel in kept] == [False, False, True, True, True]
    # A larger one needs one piece, which is there when all have left.
    kept.append(ring.send(parts(5, rows=30)))
    assert [parcel.arrived for parcel in kept] == [True] * 5 + [False] and len(ring._places) == 1
    for seed, parcel in enumerate(kept):
        assert same(parcel.open(), parts(seed, rows=30 if seed == 5 else 16))


def test_one_that_nobody_wants_any_more_is_not_waited_for() -> None:
    ring = SlowRing(2 * parcel_bytes(parts(0)))
    for seed in range(9):
        ring.send(parts(seed))
    assert not ring.waits


def test_what_is_larger_than_the_ring_has_memory_of_its_own(device) -> None:
    ring = Ring(parcel_bytes(parts(0)), device)
    held = ring.send(parts(1, device))
    for seed in range(3):
        large = ring.send(parts(seed, device, rows=999))
        assert same(large.open(), parts(seed, rows=999)) and not lies_in(ring, large)
    assert same(held.open(), parts(1)) and lies_in(ring, held)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_through_a_small_ring(seed: int, slow: bool) -> None:
    """Parcels of all sizes, kept for any time, opened at any time."""
    rng, size = random.Random(seed), 6 * parcel_bytes(parts(0))
    ring = SlowRing(size) if slow else Ring(size, CPU)
    kept: list[tuple[Parcel, list[Tensor]]] = []
    for step in range(300):
        sent = parts(step, rows=rng.choice((1, 4, 16, 50, 120)))
        kept.append((ring.send(sent), sent))
        assert sum(place.stop - place.start for place in ring._places) <= ring.nbytes
        while len(kept) > rng.choice((0, 1, 5, 30)):
            parcel, expected = kept.pop(rng.randrange(len(kept)))
            assert same(parcel.open(), expected)
            del parcel
    assert all(same(parcel.open(), expected) for parcel, expected in kept)


def test_memory_is_not_written_while_somebody_reads(monkeypatch) -> None:
    ring = Ring(parcel_bytes(parts(0)), CPU)
    parcel, expected = ring.send(parts(0)), parts(0)
    read = parcel.open()[0].numpy()
    let_go = threading.Event()

    def reader() -> None:
        nonlocal read
        let_go.wait()
        assert bytes(read) == bytes(expected[0].numpy())
        read = None

    thread = threading.Thread(target=reader)
    thread.start()
    threading.Timer(0.05, let_go.set).start()
    other = ring.send(parts(1))
    thread.join()
    assert let_go.is_set() and same(other.open(), parts(1)) and same(parcel.open(), parts(0))

    monkeypatch.setattr(ring_module, "PATIENCE", 0.01)
    held = other.open()
    for _ in range(2):  # it stays refused, and stays where it is
        with pytest.raises(GuidanceError, match="were looked at for 0 s while their memory was needed"):
            ring.send(parts(2))
        assert same(held, parts(1))
    del held
    assert same(ring.send(parts(2)).open(), parts(2)) and same(other.open(), parts(1))


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    ring = Ring(4 * parcel_bytes(parts(0)), device)
    ring.send(parts(0, device)).open()  # pins the memory
    sent = [parts(seed, device) for seed in range(3)]
    busy, start = torch.rand(4096, 4096, device=device), torch.cuda.Event()
    busy = busy @ busy
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            busy = busy @ busy
        start.record()
        found = [ring.send(tensors) for tensors in sent]
        early = [parcel.arrived for parcel in found]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert early == [False] * 3
    assert all(same(parcel.open(), tensors) for parcel, tensors in zip(found, sent, strict=True))
    assert start.query()
