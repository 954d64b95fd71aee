"""Bad frames: cut, altered, forged, foreign. Nothing but the bytes that encode writes is ever believed."""

from __future__ import annotations

import ast
import io
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tracefp4
from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import GuidanceCorrupt, GuidanceError, GuidanceMismatch
from tracefp4.guidance.frame import Expectation, decode, encode
from tracefp4.guidance.header import LIMITS, build_header, encode_header
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record

Reseal = Callable[[bytes], bytes]
SHAPE = SiteShape(Site(0, Kind.EXPERTS_IN), 1, 48, 16, True)


def forge(header: bytes, body: bytes = b"", *, total: int | None = None, length: int | None = None) -> bytes:
    """A frame with any header, with room for the checksum."""
    head = header.ljust(-(-len(header) // 64) * 64, b"\0")
    length, total = len(header) if length is None else length, 64 + len(head) + len(body) if total is None else total
    return struct.pack("<8sHHIQ40s", b"\x89TFP4\r\n\x1a", 1, 0, length, total, b"") + head + body


def flipped(frame: bytes, bit: int) -> bytes:
    out = bytearray(frame)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def test_every_single_bit_flip_is_detected(tiny: Record) -> None:
    frame = encode(tiny)
    assert len(frame) < 700
    for bit in range(8 * len(frame)):
        with pytest.raises(GuidanceCorrupt):
            decode(flipped(frame, bit))


def test_every_truncation_is_detected(tiny: Record) -> None:
    frame = encode(tiny)
    for length in range(len(frame)):
        with pytest.raises(GuidanceCorrupt, match=f"{length} bytes"):
            decode(frame[:length])


@pytest.mark.parametrize("more", [b"\0", b"\0" * 64, b"x", None])
def test_trailing_bytes_are_detected(tiny: Record, more: bytes | None) -> None:
    frame = encode(tiny)
    with pytest.raises(GuidanceCorrupt, match=f"says that it has {len(frame)}"):
        decode(frame + (frame if more is None else more))


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_larger_damage_is_detected(small: Record, data: st.DataObject) -> None:
    frame = bytearray(encode(small))
    start = data.draw(st.integers(0, len(frame) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=64))
    changed = frame[:start] + damage + frame[start + len(damage) :]
    if changed != frame:
        with pytest.raises(GuidanceCorrupt):
            decode(changed)
    cut = data.draw(st.integers(1, 32))
    with pytest.raises(GuidanceCorrupt):
        decode(frame[:start] + frame[start + cut :])


def test_a_forged_bit_is_refused_or_means_what_it_says(tiny: Record, reseal: Reseal) -> None:
    """With a valid checksum every altered frame is refused, or is exactly what its record encodes to."""
    frame = encode(tiny)
    accepted = 0
    for bit in range(8 * len(frame)):
        forged = reseal(flipped(frame, bit))
        try:
            record = decode(forged)
        except GuidanceError:
            continue
        accepted += bit not in range(24 * 8, 40 * 8)
        assert encode(record) == forged or bit in range(24 * 8, 40 * 8)
    assert accepted > 0


def test_the_reserved_bytes(tiny: Record, reseal: Reseal) -> None:
    for place in (10, 11, 40, 63):
        with pytest.raises(GuidanceCorrupt, match="reserved bytes"):
            decode(reseal(flipped(encode(tiny), 8 * place)))


def test_gaps_and_unused_bits_must_be_zero(tiny: Record, reseal: Reseal) -> None:
    frame = encode(tiny)
    with pytest.raises(GuidanceCorrupt, match="between sections and are not zero"):
        decode(reseal(flipped(frame, 8 * (64 + int.from_bytes(frame[12:16], "little")))))
    body = 64 + -(-int.from_bytes(frame[12:16], "little") // 64) * 64
    with pytest.raises(GuidanceCorrupt, match="unused bits of its valid rows"):
        decode(reseal(flipped(frame, 8 * body + 7)))
    place = frame.index(tiny.sites[Site(0, Kind.EXPERTS_IN)].scales.numpy().tobytes())
    with pytest.raises(GuidanceCorrupt, match=r"at site 0\.experts_in: unused bits of its packed scales"):
        decode(reseal(flipped(frame, 8 * place + 7)))


def test_another_version_is_no_corruption(tiny: Record, reseal: Reseal) -> None:
    frame = bytearray(encode(tiny))
    frame[8] = 2
    with pytest.raises(GuidanceMismatch, match="has version 2, this reader knows version 1"):
        decode(reseal(bytes(frame)))


def test_huge_claims_are_refused_before_allocation(tiny: Record, reseal: Reseal) -> None:
    rows, _ = build_header(Plan.parse("r1-all/s8"), [SHAPE], 2**40)
    wide, _ = build_header(Plan.parse("r1-all/s8"), [replace(SHAPE, width=2**40)], 4)
    many, _ = build_header(Plan.parse("r1-all/s8"), [replace(SHAPE, vectors=2**40)], 4)
    long, _ = build_header(Plan.parse("r1-all/s8"), [SHAPE], LIMITS.rows)
    deep, _ = build_header(Plan.parse("none"), [], 4, routes=("uint8", 2**40, 2**20))
    forged = {
        str(2**40): reseal(forge(encode_header(rows))),
        f"1 vectors of {2**40} values": reseal(forge(encode_header(wide))),
        f"{2**40} vectors": reseal(forge(encode_header(many))),
        "its header describes": reseal(forge(encode_header(long))),
        f"routes of {2**40} layers": reseal(forge(encode_header(deep))),
        f"says that it has {2**40}": forge(encode_header(rows), total=2**40),
        f"header of {2**32 - 1} bytes": forge(encode_header(rows), length=2**32 - 1),
        "header of 70000 bytes": forge(b"x" * 64, length=70_000),
    }
    for message, frame in forged.items():
        tracemalloc.start()
        try:
            with pytest.raises(GuidanceCorrupt, match=message):
                decode(frame)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 200_000, message


def test_too_many_sites_are_refused(reseal: Reseal) -> None:
    shapes = [SiteShape(Site(layer, Kind.K), 1, 16, 16, False) for layer in range(LIMITS.sites + 1)]
    header, _ = build_header(Plan.parse("r1-all/s8"), shapes, 0)
    with pytest.raises(GuidanceCorrupt, match=f"{LIMITS.sites + 1} sites, at most {LIMITS.sites}"):
        decode(reseal(forge(encode_header(header))))


def good_fields() -> dict:
    header, _ = build_header(Plan.parse("r1-all/s8"), [SHAPE], 2)
    return msgspec.msgpack.decode(encode_header(header))


def test_older_frames_leave_whole_scales_unsaid(reseal: Reseal) -> None:
    header, body = build_header(Plan.parse("r1-all/s8"), [SHAPE], 2)
    assert header.plan == "r1-all/s8"
    record = decode(
        reseal(forge(msgspec.msgpack.encode(good_fields() | {"plan": "r1-all"}), bytes(body))),
        Expectation(plan="r1-all/s8"),
    )
    assert record.sites[SHAPE.site].scale_bits == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown field `extra`"),
        ({"rows": 2.0}, "Expected `int`, got `float`"),
        ({"rows": "2"}, "Expected `int`, got `str`"),
        ({"rows": -1}, "-1 rows"),
        ({"rows": True}, "Expected `int`, got `bool`"),
        ({"rows": msgspec.msgpack.Ext(1, b"\0" * 8)}, "got `ext`"),
        ({"plan": "r1-all:kv+experts/s8"}, "plan 'r1-all:kv\\+experts/s8' is written 'r1-all/s8'"),
        ({"plan": "r9-all"}, "unknown plan 'r9-all'"),
        ({"plan": "none"}, "plan 'none' with 1 sites"),
        ({"tokens": "0" * 31 + "G"}, "token hash has 32 hex"),
        ({"numerics": "a\nb"}, "numerics hash"),
        ({"weights": 2**63}, "weight version lies in"),
        ({"valid": [0, 2]}, "the places of its sections"),
        ({"valid": [64, 1]}, "the places of its sections"),
        ({"sites": []}, "with 0 sites"),
        ({"routes": ["int64", 1, 1, [64, 2]]}, "Invalid enum value 'int64'"),
        ({"routes": ["uint8", 0, 1, [64, 0]]}, "routes of 0 layers"),
    ],
)
def test_strange_headers(reseal: Reseal, change: dict, message: str) -> None:
    header, body = build_header(Plan.parse("r1-all/s8"), [SHAPE], 2)
    assert decode(reseal(forge(encode_header(header), bytes(body)))).rows == 2
    with pytest.raises(GuidanceCorrupt, match=message):
        decode(reseal(forge(msgspec.msgpack.encode(good_fields() | change), bytes(body))))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, -1, "layers are accepted"),
        (0, 2**16, "layers are accepted"),
        (1, "weights", "no such kind of site"),
        (1, "experts_mid", "no such kind of site"),
        (2, 0, "0 vectors"),
        (3, 40, "not a multiple of 8 and of the block size 16"),
        (4, 0, "block size 0"),
        (5, 1, "Expected `bool`, got `int`"),
        (6, [0, 12], "the places of its sections"),
        (6, [2**63, 2**63], "the places of its sections"),
        (7, [64, 6], "the places of its sections"),
        (8, None, "the places of its sections"),
        (9, [256, 4], "the places of its sections"),
    ],
)
def test_strange_sites(reseal: Reseal, place: int, value: object, message: str) -> None:
    _, body = build_header(Plan.parse("r1-all/s8"), [SHAPE], 2)
    fields = good_fields()
    fields["sites"][0][place] = value
    with pytest.raises(GuidanceCorrupt, match=message):
        decode(reseal(forge(msgspec.msgpack.encode(fields), bytes(body))))


def test_sites_twice_or_out_of_order(reseal: Reseal) -> None:
    header, body = build_header(Plan.parse("r1-all/s8"), [SHAPE, SHAPE], 2)
    with pytest.raises(GuidanceCorrupt, match=r"0\.experts_in comes after site 0\.experts_in"):
        decode(reseal(forge(encode_header(header), bytes(body))))
    header, body = build_header(Plan.parse("r1-all/s8"), [SHAPE, replace(SHAPE, site=Site(1, Kind.K))], 2)
    swapped = msgspec.structs.replace(header, sites=tuple(reversed(header.sites)))
    with pytest.raises(GuidanceCorrupt, match="sites are sorted"):
        decode(reseal(forge(encode_header(swapped), bytes(body))))


def test_one_header_in_other_bytes(reseal: Reseal) -> None:
    """MessagePack has several encodings of a value; only one of them is a frame."""
    header, body = build_header(Plan.parse("r1-all/s8"), [SHAPE], 2)
    raw = encode_header(header)
    longer = raw.replace(b"\xa4rows\x02", b"\xa4rows\xcd\x00\x02")
    twice = bytes([raw[0] + 1]) + raw[1:] + b"\xa4rows\x02"
    fields = good_fields()
    moved = msgspec.msgpack.encode({"rows": fields.pop("rows"), **fields})
    for other in (longer, twice, moved):
        assert other != raw
        with pytest.raises(GuidanceCorrupt, match="not in canonical form"):
            decode(reseal(forge(other, bytes(body))))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc0",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa4plan\xc6\xff\xff\xff\xff",
        b"{}",
    ],
    ids=["empty", "nil", "deep", "long array", "long string", "long bytes", "json"],
)
def test_headers_that_are_none(reseal: Reseal, header: bytes) -> None:
    with pytest.raises(GuidanceCorrupt, match="is no header"):
        decode(reseal(forge(header)))


class Canary:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.path),))


def test_foreign_files_are_named_and_never_run(tmp_path: Path, tiny: Record, reseal: Reseal) -> None:
    canary = Canary(tmp_path / "ran")
    saved, array = io.BytesIO(), io.BytesIO()
    torch.save({"canary": canary}, saved)
    np.save(array, np.zeros(4))
    pickled = pickle.dumps(canary)
    foreign = {
        "perhaps a pickle": pickled,
        "perhaps a zip archive": saved.getvalue(),
        "perhaps a NumPy file": array.getvalue(),
        "starts with 7b": b'{"plan": "r1-all/s8"}' * 10,
        "starts with 78": zlib.compress(bytes(10_000_000)),
        "empty": b"",
        "cut off after 4 bytes": encode(tiny)[:4],
        "is no header": reseal(forge(pickled)),
    }
    for message, data in foreign.items():
        with pytest.raises(GuidanceCorrupt, match=message):
            decode(data)
    assert not canary.path.exists()
    pickle.loads(pickled)
    assert canary.path.exists()


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(GuidanceCorrupt):
        decode(data)


@given(st.binary(max_size=200), st.binary(max_size=100))
@settings(max_examples=60)
def test_random_headers(reseal: Reseal, header: bytes, body: bytes) -> None:
    with pytest.raises(GuidanceCorrupt):
        decode(reseal(forge(header, body)))


@pytest.mark.parametrize("buffer", [None, "text", 5, [1, 2]])
def test_what_is_no_buffer(buffer: object) -> None:
    with pytest.raises(GuidanceCorrupt, match="no contiguous buffer"):
        decode(buffer)  # type: ignore[arg-type]


OPTIMISED = """
import sys
from tracefp4.errors import GuidanceCorrupt, GuidanceError
from tracefp4.guidance.frame import Expectation, Expectation, decode
frame = open(sys.argv[1], "rb").read()
decode(frame, Expectation(tokens=range(6)))
caught = 0
for bad in [frame[:-1], frame + b"x", *(frame[:i] + bytes([frame[i] ^ 4]) + frame[i + 1 :] for i in range(len(frame)))]:
    try:
        decode(bad)
    except GuidanceCorrupt:
        caught += 1
try:
    decode(frame, Expectation(tokens=range(1, 7)))
except GuidanceError:
    caught += 1
print(__debug__, caught == len(frame) + 3)
"""


def test_no_check_is_an_assertion() -> None:
    for path in (Path(tracefp4.__file__).parent / "guidance").glob("*.py"):
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path


@pytest.mark.slow
def test_the_checks_hold_under_python_o(tmp_path: Path, tiny: Record) -> None:
    path = tmp_path / "frame"
    path.write_bytes(encode(tiny))
    source = Path(tracefp4.__file__).parent.parent
    command = [sys.executable, "-O", "-c", OPTIMISED, str(path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
