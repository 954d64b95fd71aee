"""Places are the same however they are found, and what is known of them never replaces looking at a frame."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.errors import GuidanceCorrupt, GuidanceMismatch
from tracefp4.guidance.frame import Expectation, decode, encode
from tracefp4.guidance.header import build_header, sections
from tracefp4.guidance.layout import layout_of, make_layout, make_table, table_of
from tracefp4.guidance.plan import Plan


@pytest.mark.parametrize("rows", [0, 1, 16, 77])
@pytest.mark.parametrize("plan", ["r1-all+mid", "r3-all+mid/s3", "c2-all+mid/s2"])
def test_runs_cover_every_site_once_and_show_its_sections(small_shapes, qwen35, rows, plan) -> None:
    for shapes in (small_shapes, qwen35, qwen35[3:20], qwen35[:1]):
        layout = make_layout(Plan.parse(plan), make_table(shapes), rows, None)
        frame = torch.arange(layout.size // 4 + 1, dtype=torch.int32).view(torch.uint8)
        assert sorted(i for run in layout.table.runs for i in run.sites) == list(range(len(shapes)))
        for run in layout.table.runs:
            parts, checked = layout.parts(frame, 0, run), layout.plan.checked
            if checked:
                assert not parts.planes.numel()
                parts = parts._replace(planes=None)
            for place, index in enumerate(run.sites):
                entry = layout.sites[index]
                assert layout.table.shapes[index] == entry.shape
                codes = (None, entry.codes) if checked else (entry.codes, None)
                others = (entry.block_scales, entry.global_scales, codes[1], entry.checks)
                for part, section in zip(parts, (codes[0], *others), strict=True):
                    assert (part is None) == (section is None)
                    if part is not None and section[1]:
                        own = part[place].contiguous().flatten().view(torch.uint8)
                        assert torch.equal(own, frame[section[0] : section[0] + section[1]])


def test_layers_that_repeat_make_few_runs(qwen35) -> None:
    moe = [s for s in qwen35 if s.site.kind not in (Kind.K, Kind.V)]
    assert [len(run.sites) for run in make_table(moe).runs] == [40, 40]
    assert len(make_table(qwen35).runs) < 50


def test_gaps_are_what_no_section_covers(small_shapes) -> None:
    layout = make_layout(Plan.parse("r2-all+mid/s3"), make_table(small_shapes), 19, ("int16", 2, 3))
    header, size = build_header(Plan.parse("r2-all+mid/s3"), small_shapes, 19, routes=("int16", 2, 3))
    assert size == layout.size and header.sites == layout.sites
    covered = bytearray(size)
    for start, length in (*sections(header), *((a, b - a) for a, b in layout.gaps)):
        assert not any(covered[start : start + length])
        covered[start : start + length] = b"\1" * length
    assert all(covered)


def test_tables_are_kept_by_their_sites(small_shapes) -> None:
    assert table_of(small_shapes) is table_of(list(small_shapes))
    plan = Plan.parse("r1-all+mid")
    kept = layout_of(plan, table_of(small_shapes), 5, None)
    assert kept is layout_of(plan, table_of(small_shapes), 5, None)
    assert kept is not layout_of(plan, table_of(small_shapes), 6, None)


def test_an_expected_frame_is_checked_like_any_other(small, small_shapes, reseal) -> None:
    """Every byte that is not data, altered under a sound checksum: the same sentence with and without expectation."""
    frame = encode(small)
    expect = Expectation(shapes=small_shapes, plan=small.plan)
    assert encode(decode(frame, expect)) == frame
    length = int.from_bytes(frame[12:16], "little")
    start = -(-(64 + length) // 64) * 64
    header, _ = build_header(Plan.parse(small.plan), small_shapes, small.rows, routes=("int16", 2, 3))
    data = bytearray(len(frame) - start)
    for a, n in sections(header):
        data[a : a + n] = b"\1" * n
    places = [*range(64, start), *(start + i for i, covered in enumerate(data) if not covered)]
    refused = 0
    for place in places:
        bad = bytearray(frame)
        bad[place] ^= 1
        bad = reseal(bytes(bad))
        said = []
        for expected in (None, expect):
            try:
                decode(bad, expected)
                said.append("")
            except (GuidanceCorrupt, GuidanceMismatch) as error:
                said.append(str(error))
        refused += bool(said[0])
        # What a frame alone allows, such as another plan, an expectation may refuse; never the other way round.
        assert said[1] == said[0] or (not said[0] and "expected" in said[1])
    assert refused > len(places) - 200


def test_unused_bits_are_found_at_their_site(make, small_shapes, reseal) -> None:
    shapes = tuple(replace(small_shapes[0], site=Site(layer, Kind.EXPERTS_IN)) for layer in range(3))
    record = make("r1-all/s3", shapes, range(6))
    frame = encode(record)
    expect = Expectation(shapes=shapes)
    header, body = build_header(Plan.parse(record.plan), shapes, 5)
    bad = bytearray(frame)
    bad[len(frame) - body + header.sites[1].block_scales[0]] |= 0x80
    for expected in (None, expect):
        with pytest.raises(GuidanceCorrupt, match=r"at site 1\.experts_in: unused bits"):
            decode(reseal(bytes(bad)), expected)


def test_moved_sections_are_refused_where_the_sites_are_known(small, small_shapes, reseal) -> None:
    frame = encode(small)
    length = int.from_bytes(frame[12:16], "little")
    fields = msgspec.msgpack.decode(frame[64 : 64 + length])
    for change in ("valid", "routes"):
        moved = fields | {change: [0, 2] if change == "valid" else ["int16", 2, 3, [0, 228]]}
        raw = msgspec.msgpack.encode(moved)
        assert len(raw) <= length
        head = raw.ljust(-(-(64 + length) // 64) * 64 - 64, b"\0")
        bad = frame[:12] + len(raw).to_bytes(4, "little") + frame[16:64] + head + frame[64 + len(head) :]
        with pytest.raises(GuidanceCorrupt, match="the places of its sections|its header describes"):
            decode(reseal(bad), Expectation(shapes=small_shapes))
