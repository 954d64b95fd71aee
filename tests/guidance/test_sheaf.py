"""What is cut out of a sheaf is byte for byte what a record of the same rows is written as."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.errors import GuidanceError
from tracefp4.guidance import header
from tracefp4.guidance.codec import unpack_scales
from tracefp4.guidance.frame import decode, encode, encode_rows, pending_rows
from tracefp4.guidance.layout import table_of
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record
from tracefp4.guidance.sheaf import Sheaf
from tracefp4.guidance.store import pull_from

Maker = Callable[..., Record]


def bundle(records: list[Record], wholes: list[Record]) -> tuple[Sheaf, list[int]]:
    """A sheaf of several records; ``wholes`` are the same with scales of 8 bits."""
    starts, end = [], 0
    for record in records:
        starts.append(end)
        end += -(-record.rows // 16) * 16
    valid = torch.zeros(end, dtype=torch.bool)
    for start, record in zip(starts, records, strict=True):
        valid[start : start + record.rows] = record.valid
    shapes = [part.shape for part in records[0].sites.values()]
    sheaf = Sheaf.new(Plan.parse(records[0].plan), table_of(shapes), valid)
    for index, run in enumerate(sheaf.layout.table.runs):
        for position, shape in enumerate(sheaf.layout.table.of(run)):

            def spread(name: str, source: list[Record], site=shape.site) -> torch.Tensor | None:
                found = [getattr(record.sites[site], name) for record in source]
                if found[0] is None:
                    return None
                out = found[0].new_full((1, end, *found[0].shape[1:]), 7)
                for start, part in zip(starts, found, strict=True):
                    out[0, start : start + len(part)] = part
                return out

            scales = spread("scales", wholes)
            whole = unpack_scales(scales, 8, shape.width // shape.block)
            sheaf.put(index, position, spread("planes", wholes), whole, spread("global_scale", records))
    return sheaf, starts


@pytest.mark.parametrize(
    "plan", ["r1-all+mid/s8", "r2-all+mid/s3", "r4-all+mid/s2", "r1-all:kv/s3", "c1-all+mid/s2", "c3-all/s8"]
)
@pytest.mark.parametrize("lengths", [(19,), (16, 1, 0, 35), (5, 33)])
def test_frames_of_a_sheaf_are_those_of_its_records(make: Maker, small_shapes, qwen35, plan, lengths) -> None:
    for shapes in (small_shapes, qwen35[:11]):
        wholes, records = [], []
        for seed, rows in enumerate(lengths):
            some = {"seed": seed, "absent": [3] if rows > 5 else []}
            wholes.append(make(plan.replace("c", "r").partition("/")[0] + "/s8", shapes, range(7, 8 + rows), **some))
            records.append(make(plan, shapes, range(7, 8 + rows), **some))
        sheaf, starts = bundle(records, wholes)
        for start, record in zip(starts, records, strict=True):
            about = {"token_hash": record.token_hash, "numerics_hash": record.numerics_hash}
            found = encode_rows(sheaf, start, record.rows, **about, weight_version=record.weight_version)
            assert found == encode(record)
            assert encode(decode(found)) == found


def test_frames_do_not_depend_on_what_their_memory_held(make: Maker, small_shapes, monkeypatch) -> None:
    class Dirty:
        def take(self, nbytes: int) -> memoryview:
            return memoryview(bytearray(b"\xff" * nbytes))

    monkeypatch.setattr(header, "BLOCKS", Dirty())
    whole, record = (make(plan, small_shapes, range(20), absent=[3]) for plan in ("r2-all+mid/s8", "r2-all+mid/s3"))
    sheaf, _ = bundle([record], [whole])
    about = {"token_hash": record.token_hash, "numerics_hash": record.numerics_hash}
    found = encode_rows(sheaf, 0, record.rows, **about, weight_version=record.weight_version)
    assert found.readonly and decode(found).rows == 19
    assert found == encode(record)
    monkeypatch.undo()
    assert found == encode(record)


def test_a_frame_stays_as_it_is_while_others_are_written(make: Maker, small_shapes) -> None:
    record = make("r1-all+mid/s8", small_shapes, range(40))
    sheaf, _ = bundle([record], [record])

    def write(weights: int) -> memoryview:
        about = {"token_hash": record.token_hash, "numerics_hash": record.numerics_hash}
        return encode_rows(sheaf, 0, record.rows, **about, weight_version=weights)

    kept = decode(write(0))
    site = next(iter(kept.sites))
    planes = kept.sites[site].planes
    for weights in range(1, 30_000, 100):
        write(weights)
    assert torch.equal(planes, record.sites[site].planes)
    assert encode(kept) == write(0)


def test_what_cannot_be_framed_is_said(make: Maker, small_shapes) -> None:
    record = make("r1-all/s8", small_shapes, range(20))
    sheaf, _ = bundle([record], [record])
    for wrong, message in (
        ({"token_hash": "0" * 31}, "a token hash has 32 hex characters"),
        ({"numerics_hash": ""}, "a numerics hash has 1 to 64 printable characters"),
        ({"weight_version": -1}, "a weight version lies in"),
    ):
        about = {"token_hash": "0" * 32, "numerics_hash": "n", "weight_version": 0} | wrong
        with pytest.raises(GuidanceError, match=f"cannot be framed: {message}"):
            encode_rows(sheaf, 0, 19, **about)


def test_bits_that_were_checked_are_pulled_row_by_row(make: Maker, small_shapes) -> None:
    plans = ("r2-all+mid/s8", "c2-all+mid/s2")
    wholes, records = ([make(plan, small_shapes, range(7, 8 + n), seed=n) for n in (19, 5)] for plan in plans)
    sheaf, starts = bundle(records, wholes)
    for start, record, whole in zip(starts, records, wholes, strict=True):
        about = {"token_hash": record.token_hash, "numerics_hash": record.numerics_hash, "weight_version": 3}
        pending = pending_rows(sheaf, start, record.rows, **about)
        assert pending.take() == encode(record)
        for site, part in whole.sites.items():
            wanted = [[], [4], [0, 3]]
            found = pull_from(site, [(pending.source, np.array(rows, np.int64)) for rows in wanted])
            for rows, bits in zip(wanted, found, strict=True):
                assert np.array_equal(bits, part.planes[rows].numpy())
        for first, last in ((1, record.rows), (-1, 1)):
            with pytest.raises(GuidanceError, match=f"rows {first} to {last} were asked for"):
                pull_from(site, [(pending.source, np.array([first, last]))])
        with pytest.raises(GuidanceError, match=r"no bits of site 9\.k"):
            pull_from(Site(9, Kind.K), [(pending.source, np.array([0]))])
    plain, _ = bundle(wholes, wholes)
    assert pending_rows(plain, 0, 19, **about).source is None


def test_rows_outside_a_sheaf_are_refused(make: Maker, small_shapes) -> None:
    record = make("r1-all/s8", small_shapes, range(20))
    sheaf, _ = bundle([record], [record])
    for start, rows in ((8, 4), (16, 17), (-16, 4), (0, -1)):
        with pytest.raises(GuidanceError, match="sequences start at multiples of 16"):
            encode_rows(sheaf, start, rows, token_hash="0" * 32, numerics_hash="n", weight_version=0)
