"""A checked site gives the same operands through kernels as one whose bits came with the frame."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.formats import blocks
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.record import SiteRecord
from tracefp4.guidance.store import Source
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.training.batch import GuidedRows
from tracefp4.training.pulls import Pulls
from tracefp4.training.sites import TrainerSites

ROWS = 6


@pytest.mark.parametrize("complete", [True, False])
def test_operands_of_a_checked_site(complete, device, make_values, same):
    spec, site = get_spec("nvfp4-w4a4-kv4"), Site(0, Kind.EXPERTS_MID)
    sites, numerics = TrainerSites(describe(tiny_model("qwen3_moe")), spec), spec.for_kind(Kind.EXPERTS_MID)
    shape = replace(sites.shapes[site], width=96)
    gate_up = torch.cat([make_values(ROWS * shape.vectors, 96, "wide", seed) for seed in (3, 4)], dim=-1).to(device)
    gate, up = gate_up.chunk(2, -1)
    x = torch.nn.functional.silu(gate) * up
    theirs = blocks.quantize((x.float() * 1.01).bfloat16(), numerics)
    parts = (part.view(ROWS, shape.vectors, -1) for part in (theirs.codes, theirs.scales))
    valid = torch.tensor([True] * (ROWS - 1) + [complete], device=device)
    whole = SiteRecord.pack(shape, *parts, theirs.global_scale.view(ROWS, -1), 1, 8, valid)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(device)

    def pull(_, wanted):
        return [whole.planes.cpu().numpy()[rows] for _, rows in wanted]

    def guided(checked: bool) -> GuidedRows:
        record = whole.reduce(1, 2, valid, checked=checked)
        record.checks = record.checks[None]
        pulls = Pulls(1, [Source(pull, None)], ROWS, int(valid.sum())) if checked else None
        return GuidedRows(valid, complete, int(valid.sum()), {site: record}, pulls)

    found = []
    for checked in (False, True):
        sites.guidance = guided(checked)
        assert (sites.gated(site, gate_up, numerics) is None) == checked  # the site is not settled yet
        operands = [sites.operand(site, x, numerics, None), sites.operand(site, x[order], numerics, order)]
        operands.append(sites.gated(site, gate_up, numerics))
        values = sites.values(site, x, numerics)
        sites.guidance = guided(checked)
        operands.append(sites.operand(site, x[order], numerics, order))  # now the first one to come by
        found.append(([(one.values, one.scale) for one in operands], values))
    for (value, scale), (other, factor) in zip(found[0][0], found[1][0], strict=True):
        assert same(value, other) and same(scale, factor)
    assert same(found[0][1], found[1][1])
    sites.guidance.pulls.confirm()
    counts = sites.pulled.take()
    assert counts is not None and counts.pulled > 0
