"""What a quantizer's kernel records is, byte for byte, what is recorded of its results."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.guidance.rounding import round_gated, round_nearest


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize(
    "name, width", [("nvfp4-te", 96), ("nvfp4-modelopt", 32), ("mxfp4-ceil", 96), ("mxfp4-ceil", 2080), ("mxfp8", 96)]
)
def test_bytes_of_a_place(name, width, bits, gated, device, make_values, capture_of, same):
    slots = torch.tensor([7, 0, 8, 3], device=device)
    tickets = torch.tensor([1, 2**31 - 1, 0x01020304, 5], dtype=torch.int32, device=device)
    found, n = capture_of(name, width, bits, device)
    expected, _ = capture_of(name, width, bits, device)
    rounded = round_gated if gated else round_nearest
    for layer in (1, 0):
        for kind, vectors in ((Kind.EXPERTS_IN, 1), (Kind.EXPERTS_MID, 3)):
            site = Site(layer, kind)
            x = make_values(4 * vectors, width * (2 if gated else 1), "wide", layer).to(device)
            one = rounded(x, n, bits, place=found.place(site, slots, tickets))
            assert one.planes is None  # they are in their place alone
            other = rounded(x, n, bits)
            expected.write(site, other, slots, tickets, None)
            assert same(one.factor(), other.factor()) and same(one.scales, other.scales)
    assert same(found._rows, expected._rows)
    assert (found._rows[[1, 2, 4, 5, 6]] == 77).all() and not (found._rows[slots] == 77).all()


def test_without_a_kernel_nothing_is_recorded_on_the_way(make_values, capture_of):
    capture, n = capture_of("nvfp4-te", 32, 2, torch.device("cpu"))
    slots, tickets = torch.tensor([4]), torch.ones(1, dtype=torch.int32)
    q = round_nearest(make_values(1, 32), n, 2, place=capture.place(Site(0, Kind.EXPERTS_IN), slots, tickets))
    assert q.planes is not None and (capture._rows == 77).all()


def test_a_site_that_the_plan_leaves_out_has_no_place(capture_of):
    capture, _ = capture_of("nvfp4-te", 32, 2, torch.device("cpu"))
    slots, tickets = torch.tensor([4]), torch.ones(1, dtype=torch.int32)
    assert capture.place(Site(5, Kind.EXPERTS_IN), slots, tickets) is None
