"""A micro-batch's guidance holds each record's bytes in its own rows, and padding that rounds to zero."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import GuidanceMismatch
from tracefp4.guidance.frame import Expectation, decode, encode
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, restrict, token_hash
from tracefp4.kernels import stack as kernel
from tracefp4.kernels.runtime import interpreted
from tracefp4.training.staging import stack_sites

SHAPES = [
    SiteShape(Site(layer, kind), vectors, width, 16, scale)
    for layer in (0, 1)
    for kind, vectors, width, scale in ((Kind.EXPERTS_IN, 1, 48, True), (Kind.K, 2, 32, False))
]


def record_of(rows: int, scale_bits: int, seed: int, bits: int = 1) -> Record:
    g = torch.Generator().manual_seed(seed)
    sites = {}
    for shape in SHAPES:
        codes = torch.randint(0, 16, (rows, shape.vectors, shape.width), dtype=torch.uint8, generator=g)
        scales = torch.randint(1, 126, (rows, shape.vectors, shape.width // 16), dtype=torch.uint8, generator=g)
        wide = torch.rand(rows, shape.vectors, generator=g) if shape.token_scale else None
        sites[shape.site] = SiteRecord.pack(shape, codes, scales, wide, bits, scale_bits)
    valid = torch.ones(rows, dtype=torch.bool)
    return Record(f"r{bits}-all", token_hash(range(rows + 1)), "n", 0, rows, valid, sites)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("scale_bits", [8, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_each_record_keeps_its_bytes(device: str, scale_bits: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    records = [record_of(37, scale_bits, 0), None, record_of(16, scale_bits, 1), record_of(1, scale_bits, 2)]
    width = 37
    found = stack_sites(records, replace(records[0]), width, torch.device(device))
    assert list(found) == list(records[0].sites)
    for site, batch in found.items():
        assert batch.shape.site == site and batch.scale_bits == scale_bits and batch.planes.device.type == device
        for name, fill in (("planes", 0), ("scales", 0), ("global_scale", 1), ("checks", 0)):
            whole = getattr(batch, name)
            assert (whole is None) == (getattr(records[0].sites[site], name) is None)
            if whole is None:
                continue
            if name != "checks":
                assert whole.is_contiguous() and len(whole) == len(records) * width
                whole = whole.unflatten(0, (len(records), width))
            else:
                assert whole.shape == (len(records), 3)
            for b, record in enumerate(records):
                own = None if record is None else getattr(record.sites[site], name)
                count = 0 if own is None else len(own)
                assert own is None or torch.equal(whole[b, :count].cpu(), own)
                assert bool((whole[b, count:] == fill).all())


def test_a_batch_does_not_share_memory_with_its_records() -> None:
    record = record_of(5, 8, 3)
    found = stack_sites([record], record, 5, torch.device("cpu"))
    site = SHAPES[0].site
    found[site].planes.zero_()
    assert record.sites[site].planes.any()


def test_frames_that_were_read_without_knowing_their_sites_go_together() -> None:
    frames = [encode(record_of(rows, 8, rows)) for rows in (5, 20)]
    read = [decode(frame) for frame in frames]
    found = stack_sites(read, read[0], 20, torch.device("cpu"))
    for site, batch in found.items():
        assert torch.equal(batch.planes.unflatten(0, (2, 20))[1], read[1].sites[site].planes)


@pytest.mark.parametrize("plan", ["r1-all/s8", "r4-all/s3", "c1-all/s2"])
@pytest.mark.parametrize("device", DEVICES)
def test_frames_are_taken_apart_on_the_device(device: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as host copies, padding included."""
    launches: list[int] = []
    monkeypatch.setattr(kernel, "stack", lambda *args, own=kernel.stack: launches.append(1) or own(*args))
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    chosen = Plan.parse(plan, num_layers=2)
    lengths, shapes = (21, 64, 1, 40), tuple(chosen.select(SHAPES, 2))
    records: list[Record | None] = []
    for rows in lengths:
        whole = record_of(rows, 8, rows, bits=4)
        frame = encode(restrict(whole, chosen, SHAPES, 2))
        memory = torch.empty(len(frame), dtype=torch.uint8, pin_memory=device == "cuda")
        memory.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        records.append(decode(memory.numpy().data, Expectation(shapes=shapes)))
    records.insert(2, None)
    like = records[0]
    assert like is not None
    expected = stack_sites(records, like, 64, torch.device("cpu"))
    place = torch.device(device)
    with interpreted() if device == "cpu" else nullcontext():
        found = stack_sites(records, like, 64, place)
    assert list(found) == list(expected) and launches == [1]
    for site, part in expected.items():
        for name in ("planes", "scales", "global_scale", "checks", "code_checks"):
            one, other = getattr(part, name), getattr(found[site], name)
            assert (one is None) == (other is None)
            assert one is None or (other.device.type == device and torch.equal(other.cpu(), one)), (site, name)


def test_records_of_other_sites_are_refused() -> None:
    one, other = record_of(4, 8, 0), record_of(4, 8, 1)
    fewer = replace(other, sites={site: part for site, part in other.sites.items() if site.layer == 0})
    with pytest.raises(GuidanceMismatch, match="sequence 1 of the micro-batch has guidance of other sites"):
        stack_sites([one, fewer], one, 4, torch.device("cpu"))
