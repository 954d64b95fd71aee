"""The rows of a decode step: by kernel what the plain code finds."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import EngineError
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


@pytest.mark.parametrize("rows, batch", [(1, 1), (3, 4), (40, 48)])
def test_the_same_sequences_one_token_further(rows, batch, device, same):
    """What is kept of the last step and counted on equals what is collected from the sequences, pages included."""
    sampling = SamplingParams(max_new_tokens=99, seed=1, temperature=0.5, top_p=0.9, top_k=3)
    before = torch.arange(900, 900 + batch, device=device)
    sequences, kept, collected = [], *(DecodeInputs(50, 9, 700, 0, device) for _ in range(2))
    for i in range(rows):
        sequence = Sequence(Request(str(i), (1,) * (1 + i % 7), 1, sampling), 0, i, stream=i, guidance=False)
        sequence.response, sequence.ticket = [5 + i], 10 + i
        sequences.append(sequence)

    def made(ahead):
        for s in sequences:
            s.pages += range(100 * s.arrival + len(s.pages), 100 * s.arrival + -(-(s.length + ahead) // 4))
        source = range(rows) if ahead else [-1] * rows
        places = zip(sequences, source, strict=True)
        return [DecodeRow(s.last_token, s.length - 1 + ahead, s.pages, s, i) for s, i in places]

    kept.fill(made(0), batch, 9)
    for ahead in range(1, 9):
        rows_now = made(ahead)
        assert kept.follows(sequences) and not kept.follows(sequences[:-1])
        kept.advance(batch, 9, before)
        collected.fill(rows_now, batch, 9, before)
        assert kept.longest == 1 + max(row.position for row in rows_now)
        for name in ("tokens", "positions", "tickets", "pages", "state_rows"):
            assert same(getattr(kept, name), getattr(collected, name)), (name, ahead)
        draws = [inputs.draw(inputs.positions) for inputs in (kept, collected)]
        for name in ("stream", "temperature", "top_k", "top_p"):
            assert same(*(getattr(draw, name) for draw in draws)), (name, ahead)
        if ahead == 4:  # a capture of another size in between forgets nothing
            kept.pad(2, 1)
    with pytest.raises(EngineError, match="cannot follow"):
        kept.advance(batch + 1, 9, before)
