"""Stores: the rules that all kinds keep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.core import Handle, Kind, Site
from tracefp4.errors import GuidanceCorrupt, GuidanceError, GuidanceMissing
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.frame import Expectation, decode, encode
from tracefp4.guidance.late_store import LateStore, Shipping
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.record import Record
from tracefp4.guidance.store import MAX_KEY, Pending, Source, Store, check_key, make_key
from tracefp4.guidance.workers import side_by_side


@pytest.fixture(params=["memory", "file", "late"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = FileStore(tmp_path / "frames") if request.param == "file" else MemoryStore()
    if request.param == "late":
        made = LateStore(made)
    yield made
    made.close()


def test_what_was_put_comes_back(store: Store, small: Record) -> None:
    frame = encode(small)
    handle = store.put("step3.0", frame)
    assert handle == Handle(store.name, "step3.0", len(frame))
    view = store.get(handle)
    assert view == frame
    assert view.readonly
    assert decode(view, Expectation(tokens=range(100, 120))).plan == small.plan
    assert store.keys() == ("step3.0",)
    assert store.nbytes == len(frame)


def test_what_is_put_is_kept_even_if_its_owner_changes_it(store: Store) -> None:
    data = bytearray(b"abcd")
    handle = store.put("a", memoryview(data))
    data[:] = b"xxxx"
    assert store.get(handle) == b"abcd"


def test_a_repeated_message_is_harmless(store: Store) -> None:
    first = store.put("a", b"abcd")
    assert store.put("a", bytearray(b"abcd")) == first
    assert store.nbytes == 4
    for other in (b"abce", b"abc", b"abcde"):
        with pytest.raises(GuidanceError, match="holds other bytes under 'a'"):
            store.put("a", other)
    assert store.get(first) == b"abcd"
    store.delete(first)
    assert store.get(store.put("a", b"abce")) == b"abce"


def test_what_is_missing(store: Store) -> None:
    handle = store.put("a", b"abcd")
    with pytest.raises(GuidanceMissing, match=r"no guidance under 'b' in .* \(1 frames\)"):
        store.get(Handle(store.name, "b", 4))
    with pytest.raises(GuidanceMissing, match="lies in store 'elsewhere'"):
        store.get(Handle("elsewhere", "a", 4))
    with pytest.raises(GuidanceMissing, match="lies in store 'elsewhere'"):
        store.delete(Handle("elsewhere", "a", 4))
    store.delete(handle)
    for action in (store.get, store.delete):
        with pytest.raises(GuidanceMissing):
            action(handle)
    assert store.keys() == ()
    assert store.nbytes == 0


@pytest.mark.parametrize("nbytes", [3, 5, 0, -1])
def test_a_handle_with_another_size(store: Store, nbytes: int) -> None:
    store.put("a", b"abcd")
    with pytest.raises(GuidanceCorrupt, match=f"has 4 bytes, its handle says {nbytes}"):
        store.get(Handle(store.name, "a", nbytes))


def test_nothing_is_no_frame(store: Store) -> None:
    with pytest.raises(GuidanceError, match="no bytes to keep under 'a'"):
        store.put("a", b"")
    assert store.keys() == ()


@pytest.mark.parametrize(
    "key", ["", ".", "..", "../a", "a/b", "/etc/passwd", ".lock", "a\0b", "a b", "ä", "-a", "a" * 161, "a\n"]
)
def test_keys_that_are_none(store: Store, key: str) -> None:
    with pytest.raises(GuidanceError, match="is not a key of a store"):
        store.put(key, b"abcd")
    with pytest.raises(GuidanceError):
        store.get(Handle(store.name, key, 4))
    with pytest.raises(GuidanceError):
        store.delete(Handle(store.name, key, 4))
    assert store.keys() == ()


@given(parts=st.lists(st.text(max_size=60) | st.integers(), max_size=4))
def test_a_key_can_be_made_of_anything(parts: list) -> None:
    key = make_key(*parts)
    assert check_key(key) == key
    assert len(key) <= MAX_KEY


@given(
    a=st.lists(st.text(alphabet="a.=/0-é", max_size=6), max_size=3),
    b=st.lists(st.text(alphabet="a.=/0-é", max_size=6), max_size=3),
)
def test_other_parts_make_another_key(a: list[str], b: list[str]) -> None:
    assert (make_key(*a) == make_key(*b)) == (a == b or ([*a, *b] in ([""], [])))


def test_keys_read_well() -> None:
    assert make_key("train-3-0", 7, "v12") == "train-3-0.7.v12"
    assert make_key("user/7", 0) == "user=2f=7.0"
    assert make_key("../x") != make_key("..", "x")
    long = make_key("x" * 300, 1)
    assert len(long) == MAX_KEY
    assert long != make_key("x" * 300, 2)


def test_clear(store: Store) -> None:
    for key in "abc":
        store.put(key, key.encode())
    store.clear()
    assert store.keys() == ()
    assert store.nbytes == 0


def test_closed(store: Store) -> None:
    handle = store.put("a", b"abcd")
    view = store.get(handle)
    store.close()
    store.close()
    assert view == b"abcd"
    for action in (
        lambda: store.put("b", b"x"),
        lambda: store.get(handle),
        lambda: store.delete(handle),
        store.keys,
        store.clear,
    ):
        with pytest.raises(GuidanceError, match="is closed"):
            action()


def test_views_outlive_deletion(store: Store) -> None:
    handle = store.put("a", b"abcd" * 5000)
    view = store.get(handle)
    store.delete(handle)
    assert view == b"abcd" * 5000


def test_many_threads(store: Store) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                own = store.put(f"t{number}.{i}", bytes([number]) * 100)
                shared = store.put(f"shared.{i}", b"same")
                if store.get(own) != bytes([number]) * 100 or store.get(shared) != b"same":
                    raise GuidanceCorrupt("wrong bytes")
                store.delete(own)
        except GuidanceError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.keys() == tuple(sorted(f"shared.{i}" for i in range(20)))
    assert store.nbytes == 80


def test_memory_has_a_limit() -> None:
    store = MemoryStore(max_bytes=10)
    handle = store.put("a", b"abcdef")
    with pytest.raises(GuidanceError, match="no room for 5 bytes under 'b' in 'memory': 6 of 10 used"):
        store.put("b", b"12345")
    assert store.keys() == ("a",)
    store.put("a", b"abcdef")
    store.delete(handle)
    store.put("b", b"12345")


def test_memory_keeps_bytes_without_a_copy(small: Record) -> None:
    frame, store = encode(small), MemoryStore()
    assert store.get(store.put("a", frame)).obj is frame


# Frames that are still with their engine ------------------------------------------------------------------------------


class Maker:
    """An engine's side of pending frames: what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def pending(self, name: str, data: bytes, nbytes: int | None = None) -> Pending:
        def take() -> bytes:
            self.asked.append(f"take {name}")
            return data

        return Pending(len(data) if nbytes is None else nbytes, take, lambda: self.asked.append(f"drop {name}"))


def test_every_store_keeps_a_pending_frame(store: Store) -> None:
    handle = store.keep("a", Maker().pending("a", b"abcd"))
    assert handle == Handle(store.name, "a", 4)
    assert store.keys() == ("a",) and store.nbytes == 4
    assert store.get(handle) == b"abcd"
    store.delete(handle)
    assert store.keys() == () and store.nbytes == 0


def test_plain_stores_take_at_once_a_late_one_when_somebody_looks() -> None:
    early, late, maker = MemoryStore(), LateStore(MemoryStore()), Maker()
    early.keep("a", maker.pending("a", b"abcd"))
    handle = late.keep("b", maker.pending("b", b"abcd"))
    assert maker.asked == ["take a"]
    for _ in range(2):
        assert late.get(handle) == b"abcd"
    assert maker.asked == ["take a", "take b"]


SITE = Site(2, Kind.K)


class Bits:
    """What an engine keeps: bits that say of which layer, frame and row they are."""

    def __init__(self) -> None:
        self.calls = 0

    def pull(self, site: Site, wanted: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        self.calls += 1
        return [np.array([[[site.layer, key, row]] for row in rows], np.uint8) for key, rows in wanted]

    def pending(self, name: str, key: int = 0) -> Pending:
        return replace(Maker().pending(name, b"abcd"), source=Source(self.pull, key))


def rows(*some: int) -> np.ndarray:
    return np.array(some, np.int64)


def test_bits_are_pulled_for_as_long_as_their_frame_is_kept(store: Store) -> None:
    frame = Bits().pending("a")
    if not store.serves_pulls:
        with pytest.raises(GuidanceError, match="leaves bits with its engine"):
            store.keep("a", frame)
        with pytest.raises(GuidanceError, match="no bits of 'b' that could be pulled"):
            store.pull(SITE, [(store.put("b", b"abcd"), rows(1))])
        assert store.keys() == ("b",)
        return
    handle, plain = store.keep("a", frame), store.put("b", b"abcd")
    assert store.get(handle) == b"abcd"
    assert [bits.tolist() for bits in store.pull(SITE, [(handle, rows(3, 5))])] == [[[[2, 0, 3]], [[2, 0, 5]]]]
    with pytest.raises(GuidanceMissing, match="'b' in .* came without bits to pull"):
        store.pull(SITE, [(handle, rows(1)), (plain, rows(5))])
    with pytest.raises(GuidanceMissing, match="lies in store 'elsewhere'"):
        store.pull(SITE, [(Handle("elsewhere", "a", 4), rows(5))])
    store.delete(handle)
    with pytest.raises(GuidanceMissing):
        store.pull(SITE, [(handle, rows(5))])
    store.put("a", b"abcd")  # another frame under the same key has no bits of the first
    with pytest.raises(GuidanceMissing):
        store.pull(SITE, [(handle, rows(5))])
    (handle,) = store.keep_all([("c", frame)])
    assert store.get(handle) and len(store.pull(SITE, [(handle, rows(1))])) == 1
    store.clear()
    with pytest.raises(GuidanceMissing):
        store.pull(SITE, [(handle, rows(1))])


def test_an_engine_is_asked_once_for_frames_that_stand_together(store: Store) -> None:
    if not store.serves_pulls:
        return
    one, other = Bits(), Bits()
    owners = (one, one, other, one)
    handles = [store.keep(f"k{key}", owner.pending(f"k{key}", key)) for key, owner in enumerate(owners)]
    for handle in handles:
        store.get(handle)
    found = store.pull(SITE, [(handle, rows(*range(key + 1))) for key, handle in enumerate(handles)])
    assert [bits.tolist() for bits in found] == [[[[2, key, row]] for row in range(key + 1)] for key in range(4)]
    assert (one.calls, other.calls) == (2, 1)


def test_a_late_store_counts_what_is_pulled() -> None:
    store = LateStore(MemoryStore())
    bits = Bits()
    handles = [store.keep(name, bits.pending(name)) for name in "ab"]
    for handle in handles:
        store.get(handle)
    store.pull(SITE, [(handles[0], rows(1, 2, 3)), (handles[1], rows(4))])
    store.pull(SITE, [(handles[0], rows(4))])
    assert store.counts() == Shipping(claimed=2, claimed_bytes=8, pulled_bytes=15)
    assert store.counts() == Shipping()


def test_frames_kept_together_are_those_kept_one_by_one(store: Store) -> None:
    maker = Maker()
    frames = [(f"k{i}", maker.pending(f"k{i}", bytes([i]) * (100 + i))) for i in range(40)]
    handles = store.keep_all(frames)
    assert handles == [Handle(store.name, f"k{i}", 100 + i) for i in range(40)]
    assert store.keep_all([]) == []
    assert [bytes(store.get(handle)) for handle in handles] == [bytes([i]) * (100 + i) for i in range(40)]
    assert sorted(maker.asked) == sorted(f"take k{i}" for i in range(40))


def test_what_an_engine_cannot_make_is_an_error_of_whoever_wanted_it(store: Store) -> None:
    def fail() -> bytes:
        raise GuidanceCorrupt("the third cannot be written")

    frames = [(f"k{i}", Maker().pending(f"k{i}", b"abcd")) for i in range(6)]
    frames[2] = ("k2", Pending(4, fail, lambda: None))
    with pytest.raises(GuidanceCorrupt, match="the third"):
        for handle in store.keep_all(frames):
            store.get(handle)
    assert isinstance(store, LateStore) or not {"k2"}.intersection(store.keys())


def test_what_an_engine_hands_over_is_copied_only_if_it_could_change() -> None:
    data, fixed = bytearray(b"abcd"), memoryview(b"efgh")
    for store in (MemoryStore(), LateStore(MemoryStore())):
        changing = store.keep("a", Pending(4, lambda: data, lambda: None))
        view = store.keep("b", Pending(4, lambda: memoryview(data), lambda: None))
        handed = store.keep("c", Pending(4, lambda: fixed, lambda: None))
        assert [bytes(store.get(h)) for h in (changing, view, handed)] == [b"abcd", b"abcd", b"efgh"]
        data[:] = b"xxxx"
        assert store.get(changing) == store.get(view) == b"abcd"
        assert store.get(handed).obj is fixed.obj
        data[:] = b"abcd"


def test_different_frames_are_claimed_at_the_same_time_and_each_once() -> None:
    store, meeting, taken = LateStore(MemoryStore()), threading.Barrier(3, timeout=20), []

    def pending(name: str) -> Pending:
        def take() -> bytes:
            meeting.wait()  # passes only while three are being fetched
            taken.append(name)
            return name.encode()

        return Pending(1, take, lambda: taken.append(f"drop {name}"))

    handles = [store.keep(name, pending(name)) for name in "abc"]
    found = side_by_side([partial(store.get, handle) for handle in handles * 4], 12)
    assert [bytes(view) for view in found] == [b"a", b"b", b"c"] * 4
    assert sorted(taken) == ["a", "b", "c"]
    assert store.counts() == Shipping(claimed=3, claimed_bytes=3)


@pytest.mark.parametrize("end", ["delete", "clear", "close"])
def test_a_frame_that_is_dropped_while_it_is_fetched_ends_once(end: str) -> None:
    store, started, go = LateStore(MemoryStore()), threading.Event(), threading.Event()
    asked: list[str] = []

    def take() -> bytes:
        started.set()
        assert go.wait(20)
        asked.append("take")
        return b"abcd"

    handle = store.keep("a", Pending(4, take, lambda: asked.append("drop")))

    def claim() -> None:
        with contextlib.suppress(GuidanceError):  # fetched, and forgotten before it could be looked at
            store.get(handle)

    claimer = threading.Thread(target=claim)
    ender = threading.Thread(target=lambda: store.delete(handle) if end == "delete" else getattr(store, end)())
    claimer.start()
    assert started.wait(20)
    ender.start()
    go.set()
    for thread in (claimer, ender):
        thread.join(20)
        assert not thread.is_alive()
    assert asked == ["take"]
    assert store.counts() == Shipping(claimed=1, claimed_bytes=4)


def test_what_nobody_claims_is_dropped_where_it_lies_and_counted() -> None:
    store, maker = LateStore(MemoryStore()), Maker()
    handles = {name: store.keep(name, maker.pending(name, name.encode() * 10)) for name in "abcd"}
    store.get(handles["a"])
    store.delete(handles["b"])
    store.delete(handles["a"])
    assert store.counts() == Shipping(claimed=1, claimed_bytes=10, dropped=1, dropped_bytes=10)
    assert store.counts() == Shipping() and Shipping().saved_share == 0
    store.put("e", b"here already")
    store.clear()
    found = store.counts()
    assert (found.claimed, found.dropped, found.dropped_bytes) == (1, 2, 20)
    assert found.saved_share == pytest.approx(20 / 32)
    assert maker.asked == ["take a", "drop b", "drop c", "drop d"]
    with pytest.raises(GuidanceMissing):
        store.get(handles["c"])
    assert store.keep("a", maker.pending("a", b"new")).nbytes == 3


def test_a_late_frame_of_another_size_is_corrupt_and_a_key_is_taken_once() -> None:
    store, maker = LateStore(MemoryStore()), Maker()
    handle = store.keep("a", maker.pending("a", b"abcd", nbytes=5))
    with pytest.raises(GuidanceCorrupt, match="4 bytes for 'a', its handle says 5"):
        store.get(handle)
    for again in (lambda: store.keep("a", maker.pending("a", b"x")), lambda: store.put("a", b"x")):
        with pytest.raises(GuidanceError, match="under 'a'"):
            again()
    store.close()
    assert maker.asked == ["take a", "drop a"]
