"""Work that is repeated: as it comes at first, then from what was captured, anew where something else is asked for."""

from __future__ import annotations

import pytest
import torch

from tracefp4.models import repeated
from tracefp4.models.repeated import Repeated, addresses


def test_work_is_captured_the_second_time_and_replayed_from_then_on(monkeypatch, rerun):
    captures = []
    monkeypatch.setattr(repeated, "cuda_graphs", lambda: lambda bodies: captures.append(1) or rerun(bodies))
    x, work = torch.zeros(3), Repeated()
    results = []
    for step in range(5):
        x.fill_(step)
        [out] = work.run(("a",), lambda: [x + 1])
        results.append(out)
        assert torch.equal(out, torch.full((3,), step + 1.0))
    assert captures == [1] and results[1] is results[2] is results[4] and results[0] is not results[1]
    [other] = work.run(("b",), lambda: [x + 2])
    assert torch.equal(other, x + 2) and captures == [1]
    work.run(("b",), lambda: [x + 2])
    assert captures == [1, 1]


def test_what_has_no_addresses_is_never_captured(monkeypatch):
    monkeypatch.setattr(repeated, "cuda_graphs", lambda: pytest.fail("captured"))
    work = Repeated()
    assert addresses([torch.zeros(2)]) is None
    for _ in range(3):
        assert work.run(addresses([torch.zeros(2)]), lambda: [torch.ones(1)])[0] == 1


def test_work_that_cannot_be_captured_goes_on_as_before(monkeypatch):
    def broken(bodies):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(repeated, "cuda_graphs", lambda: broken)
    work, calls = Repeated(), []
    for _ in range(4):
        work.run(1, lambda: calls.append(1) or [])
    assert len(calls) == 4 and work.failure == "operation not permitted when stream is capturing"
