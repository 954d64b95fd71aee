"""Gathering: many sites in few operations, and the same bytes as site by site."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracefp4.core import KV_KINDS, Kind, Site, SiteShape
from tracefp4.formats import e2m1
from tracefp4.guidance.codec import pack_bits
from tracefp4.guidance.frame import encode, encode_rows
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord
from tracefp4.rollout import harvest
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.harvest import gather

LAYOUT = SimpleNamespace(moe_layers=(), num_experts=4, top_k=2)
SLOTS = 64


class Operations(TorchDispatchMode):
    """Counts what reaches the device: everything but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.name() and "unsafe_view" not in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))


class Stored:
    """K and V of every layer, as a pool gives them."""

    def __init__(self, layers: int) -> None:
        g = torch.Generator().manual_seed(1)
        self.codes = torch.randint(0, 256, (layers, SLOTS, 2, 16), dtype=torch.uint8, generator=g)
        self.scales = torch.randint(0, 126, (layers, SLOTS, 2, 2), dtype=torch.uint8, generator=g)

    def stored(self, layers, kind, slots):
        assert kind in (Kind.K, Kind.V)
        index = torch.tensor(list(layers))
        flip = 255 if kind is Kind.V else 0
        return self.codes[index][:, slots] ^ flip, self.scales[index][:, slots]


def shapes_of(layers: int, every: int = 1) -> tuple[SiteShape, ...]:
    out = []
    for layer in range(layers):
        out.append(SiteShape(Site(layer, Kind.EXPERTS_IN), 1, 48, 16, True))
        out.append(SiteShape(Site(layer, Kind.EXPERTS_MID), 2, 32, 16, True))
        if layer % every == 0:
            out += [SiteShape(Site(layer, kind), 2, 32, 16, False) for kind in (Kind.K, Kind.V)]
    return tuple(out)


def recorded(shapes, bits: int):
    """A capture of random outcomes under ticket 1, and what was written: codes, scales and global scales by site."""
    g = torch.Generator().manual_seed(0)
    capture = Capture(LAYOUT, shapes, bits, SLOTS, torch.device("cpu"))
    slots, tickets = torch.arange(SLOTS), torch.ones(SLOTS, dtype=torch.int32)
    capture.stamp(slots, tickets)
    written = {}
    for shape in shapes:
        if shape.site.kind in KV_KINDS:
            continue
        n, v = SLOTS * shape.vectors, shape.vectors
        codes = torch.randint(0, 16, (n, shape.width), dtype=torch.uint8, generator=g)
        scales = torch.randint(0, 126, (n, shape.width // 16), dtype=torch.uint8, generator=g)
        wide = torch.rand(n, 1, generator=g)
        pairs = None if v == 1 or shape.site.layer % 2 else torch.randperm(n, generator=g)
        rows = (codes, scales, wide) if pairs is None else (codes[pairs], scales[pairs], wide[pairs])
        q = SimpleNamespace(planes=pack_bits(rows[0], bits), scales=rows[1], global_scale=rows[2])
        capture.write(shape.site, q, slots, tickets, pairs)
        written[shape.site] = tuple(t.unflatten(0, (SLOTS, v)) for t in (codes, scales, wide))
    return capture, written


@pytest.mark.parametrize("plan", ["r1-all+mid/s8", "r2-all+mid/s3"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("at_once", [harvest.VALUES_AT_ONCE, 1])
def test_what_is_gathered_is_what_was_recorded_site_by_site(monkeypatch, plan, every, at_once) -> None:
    monkeypatch.setattr(harvest, "VALUES_AT_ONCE", at_once)
    shapes, parsed = shapes_of(5, every), Plan.parse(plan)
    capture, written = recorded(shapes, parsed.bits)
    pool = Stored(5)
    slots = torch.tensor([5, 9, 11, 0, 63, 40, 41])
    expected = torch.tensor([1, 1, 2, 1, 1, 1, 1], dtype=torch.int32)
    valid = expected == 1
    sites = {}
    for shape in shapes:
        if shape.site.kind in KV_KINDS:
            packed, scales = pool.stored([shape.site.layer], shape.site.kind, slots)
            codes, scales, wide = e2m1.unpack(packed[0]), scales[0], None
        else:
            codes, scales, wide = (t[slots] for t in written[shape.site])
            wide = wide.squeeze(-1)
        sites[shape.site] = SiteRecord.pack(shape, codes, scales, wide, parsed.bits, parsed.scale_bits, valid)
    sheaf = gather(capture, pool, slots, expected, parsed)
    assert torch.equal(sheaf.valid, valid)
    record = Record(plan, "0" * 32, "n", 2, len(slots), valid, sites)
    found = encode_rows(sheaf, 0, len(slots), token_hash="0" * 32, numerics_hash="n", weight_version=2)
    assert found == encode(record)


@pytest.mark.parametrize("plan", ["r1-all+mid/s8", "r1-all+mid/s3"])
def test_more_layers_take_no_more_operations(plan) -> None:
    counts = []
    for layers in (2, 12):
        capture, _ = recorded(shapes_of(layers), 1)
        pool, slots = Stored(layers), torch.arange(32)
        with Operations() as operations:
            sheaf = gather(capture, pool, slots, torch.ones(32, dtype=torch.int32), Plan.parse(plan))
        assert sheaf.valid.all()
        counts.append(operations.count)
    assert counts[0] == counts[1] < 200
