"""Counting failed checks: whatever is compared together, the counts are those of comparing each site at once."""

from __future__ import annotations

import torch

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.guidance.codec import chunks, count_failures, scale_checks
from tracefp4.guidance.record import SiteRecord
from tracefp4.training.checks import ScaleChecks

BATCH, ROWS = 2, 37


def made(site, blocks, guided, generator):
    """Scales of a site, and a record whose checks are those of other scales in every third site."""
    scales = torch.randint(0, 256, (BATCH * ROWS, blocks), dtype=torch.uint8, generator=generator)
    recorded = scales.clone()
    if site % 3 == 0:
        recorded[site % len(recorded)] ^= 1
    valid = guided.view(BATCH, ROWS)
    checks = scale_checks(recorded.view(BATCH, ROWS, blocks), valid)
    shape = SiteShape(Site(site, Kind.K), 1, 16 * blocks, 16, False)
    nothing = torch.empty(BATCH * ROWS, 1, 0, dtype=torch.uint8)
    return scales, SiteRecord(shape, nothing, nothing, None, checks, 2)


def test_sites_of_several_micro_batches_and_widths():
    generator, checks = torch.Generator().manual_seed(0), ScaleChecks()
    expected = torch.zeros(2, dtype=torch.int64)
    for batch in range(3):
        guided = torch.rand(BATCH * ROWS, generator=generator) < 0.8
        valid = guided.view(BATCH, ROWS)
        for site in range(12):
            scales, record = made(site, 4 if site % 4 else 9, guided, generator)
            order = torch.randperm(len(scales), generator=generator) if site == 5 else None
            checks.count(scales if order is None else scales[order], record, guided, order)
            count_failures(expected, [scales.view(BATCH, ROWS, -1)], valid, [record.checks])
        if batch == 1:
            elsewhere = torch.tensor([5, 3])
            checks.add(elsewhere)
            expected += elsewhere
    total = checks.total()
    assert total is not None
    assert total.tolist() == expected.tolist()
    assert expected[0] == 3 * 12 * BATCH * chunks(ROWS) + 5
    assert 3 < expected[1] < expected[0]
    assert checks.take() == expected[1] / expected[0]
    assert checks.take() is None


def test_nothing_is_kept_once_it_is_settled():
    generator, checks = torch.Generator().manual_seed(1), ScaleChecks()
    guided = torch.ones(BATCH * ROWS, dtype=torch.bool)
    scales, record = made(1, 4, guided, generator)
    checks.count(scales, record, guided, None)
    checks.settle()
    recorded = record.checks
    assert recorded is not None
    recorded += 1
    assert checks.take() == 0.0
