"""The rows of a decode step: by kernel what the plain code finds."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.inputs import DecodeInputs, DecodeRow
from tracefp4.rollout.request import Sequence


class Layout:
    moe_layers = ()


@pytest.mark.parametrize("rows, batch", [(1, 1), (3, 4), (150, 150)])
def test_slots_lengths_tickets_and_tokens(rows, batch, device, same, monkeypatch):
    found = []
    for switch in ("triton", "reference"):
        monkeypatch.setenv("TRACEFP4_KERNELS", switch)
        inputs = DecodeInputs(200, 8, padding_page=700, padding_row=0, device=device)
        capture = Capture(Layout, (), 1, 701 * 4, device)
        made = []
        for i in range(rows):
            request = Request(str(i), (1, 2), 1, SamplingParams(max_new_tokens=4, seed=1))
            sequence = Sequence(request=request, sample=0, arrival=0, stream=i, guidance=False)
            sequence.ticket = 2**31 - 1 - i
            pages = [(7 * i + j) % 699 for j in range(3)] if i else [3, 9, 27]
            made.append(DecodeRow(50 + i, i % 12, pages, sequence, source=(rows - 1 - i if i % 2 else -1)))
        inputs.fill(made, batch, 3, torch.arange(900, 900 + rows, device=device))
        slots, lengths, tickets = inputs.place(4, capture)
        assert slots.dtype is lengths.dtype is torch.int64 and tickets.dtype is torch.int32
        assert inputs.draw(lengths).position is lengths
        found.append([t.cpu() for t in (slots, lengths, tickets, inputs.tokens)])
        stamped = capture.stamps(slots[:rows]).cpu()
        assert all(ticket in stamped for ticket in tickets[:rows].cpu())
    assert all(same(one, other) for one, other in zip(*found, strict=True))
    slots, lengths, tickets, tokens = found[0]
    expected = [row.pages[row.position // 4] * 4 + row.position % 4 for row in made]
    assert slots.tolist() == expected + [700 * 4] * (batch - rows)
    assert lengths.tolist()[:rows] == [row.position + 1 for row in made] and not tickets[rows:].any()
    assert tokens.tolist()[:rows] == [900 + row.source if row.source >= 0 else row.token for row in made]
