"""Running the model: packed prefill, decode of one token a sequence, sampling.

The runner owns no policy. It turns the scheduler's decisions into tensors, calls the decoder of the transformers model,
and brings tokens back. Both phases attend through the pool (:mod:`tracefp4.rollout.sites`); what differs is the shape.

A decode step is a function of static buffers (:class:`DecodeInputs`) alone, from token ids to sampled tokens: block
tables, positions and sampling parameters are device tensors, and nothing in it waits for the device. So it can be
captured in a CUDA graph (:mod:`tracefp4.rollout.graphs`), and the host waits once a step, for one small copy of tokens
and log-probabilities. It need not wait before it launches the next: what that step forwards is on the device already.

Hybrid models prefill one sequence a forward, because a recurrent layer knows no sequence bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from tracefp4.kernels.runtime import usable
from tracefp4.models.layout import ModelLayout
from tracefp4.rollout.attend import slots_of_pages
from tracefp4.rollout.batch import DecodeBatch, Pieces, PrefillBatch
from tracefp4.rollout.compiled import compile_layers, compiling, uncompiled
from tracefp4.rollout.graphs import DecodeGraphs
from tracefp4.rollout.inputs import DecodeInputs, DecodeRow, draw_of
from tracefp4.rollout.pool import PageAllocator
from tracefp4.rollout.request import Sampled, Sequence
from tracefp4.rollout.sampler import Draw, sample, top_logprobs
from tracefp4.rollout.scheduler import Chunk, Start
from tracefp4.rollout.sites import EngineSites
from tracefp4.rollout.state import StatePool, cache_keyword
from tracefp4.rollout.upload import upload


@dataclass(slots=True)
class Flight:
    """A decode step whose result is on its way to the host."""

    sequences: list[Sequence]
    tokens: Tensor
    """``(B,)`` int64 on the device, until the next step overwrites it."""
    truncate: bool
    """Whether any has top-k or top-p."""
    top: int
    """The most likeliest tokens that any asked for."""
    rows: Tensor
    """``(B, 2 + 2 k)`` float64 on the host: token, log-probability, likeliest tokens and theirs."""
    arrival: torch.cuda.Event | None
    """After which ``rows`` may be read."""

    def land(self) -> Sampled:
        """Wait for the result, the only wait of a step."""
        if self.arrival is not None:
            self.arrival.synchronize()
        tokens, logprobs = self.rows[:, 0].long().tolist(), self.rows[:, 1].tolist()
        return Sampled(tokens, logprobs, self.rows[:, 2:].unflatten(1, (2, -1)) if self.rows.shape[1] > 2 else None)


class Runner:
    """Forward passes of the engine.

    Args:
        model: the engine's own model, bound to ``sites``.
        layout: its layout.
        sites: the engine's site objects.
        pages: page geometry.
        states: linear-attention states.
        max_batch: sequences that decode at once.
        max_length: tokens of the longest sequence.
        device: of the model.
        cuda_graphs: capture decode steps.
        compiled: compile decoder layers for decode steps, with the default backend or the one that is named.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        sites: EngineSites,
        pages: PageAllocator,
        states: StatePool,
        max_batch: int,
        max_length: int,
        device: torch.device,
        cuda_graphs: bool,
        compiled: bool | str = False,
    ) -> None:
        self.layout, self.sites, self.pages, self.states, self.device = layout, sites, pages, states, device
        self.decoder = model.get_submodule(layout.decoder)
        self.head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._cache_keyword = cache_keyword(self.decoder)
        widest = min(pages.num_pages, pages.pages_for(max_length))
        self.inputs = DecodeInputs(max_batch, widest, pages.padding_page, states.padding_row, device)
        self._compiled, self._sample = bool(compiled), sample
        if compiled:
            backend = "inductor" if compiled is True else compiled
            compile_layers(model, layout, backend)
            if not usable(self.head.weight):  # type: ignore[arg-type]
                self._sample = torch.compile(sample, dynamic=True, backend=backend)
        self.graph_steps = 0
        self.graphs: DecodeGraphs | None = None
        if cuda_graphs:
            # Experts by kernel need nothing of the host, so the size of a captured batch has no limit.
            experts = 0 if sites.experts_by_kernel else layout.num_experts
            self.graphs = DecodeGraphs(self.decode_step, self.inputs, experts, max_batch)

    # -- Prefill

    def prefill(self, chunks: Items[Chunk]) -> None:
        """Forward the chunks, record them, and leave the last hidden state with each prefix that is done."""
        groups = [[chunk] for chunk in chunks] if self.states.needed else [list(chunks)]
        for group in groups:
            hidden = self._prefill_packed(group)
            stop = 0
            for chunk in group:
                stop += chunk.stop - chunk.start
                chunk.prefix.done = chunk.stop
                if chunk.stop == len(chunk.prefix.tokens):
                    chunk.prefix.hidden = hidden[stop - 1].clone()

    def _prefill_packed(self, chunks: list[Chunk]) -> Tensor:
        """Hidden states ``(T, H)`` of all chunks, one after the other."""
        tokens, positions, slots, tickets = [], [], [], []
        for chunk in chunks:
            tokens += chunk.prefix.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            slots += self.pages.slots(chunk.prefix.pages, chunk.start, chunk.stop)
            tickets += [chunk.prefix.ticket] * (chunk.stop - chunk.start)
        known = [slot for chunk in chunks for slot in self.pages.slots(chunk.prefix.pages, 0, chunk.stop)]
        counts = [chunk.stop - chunk.start for chunk in chunks]
        pieces = Pieces.pack(counts, [chunk.stop for chunk in chunks], self._to_device(known))
        batch = PrefillBatch(self._to_device(slots), self._to_device(tickets).to(torch.int32), pieces)
        self.sites.capture.stamp(batch.slots, batch.tickets)
        row = chunks[0].prefix.state_row
        rows = self._to_device([row]) if row is not None else None
        continues = rows if chunks[0].start > 0 else None
        hidden = self._forward(self._to_device([tokens]), self._to_device([positions]), batch, rows, continues)
        self.sites.check_calls()
        return hidden[0]

    def _forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        batch: PrefillBatch | DecodeBatch,
        rows: Tensor | None,
        continues: Tensor | None,
    ) -> Tensor:
        """Hidden states ``(B, S, H)``; linear states are read from rows ``continues`` and left in ``rows``."""
        prefills = isinstance(batch, PrefillBatch)
        moved = self.states.moved(decode=not prefills)
        cache = self.states.gather(continues, moved)
        self.sites.batch = batch
        try:
            with nullcontext() if not self._compiled else uncompiled() if prefills else compiling():
                output = self.decoder(
                    input_ids=input_ids, position_ids=position_ids, use_cache=False, **{self._cache_keyword: cache}
                )
        finally:
            self.sites.batch = None
        if rows is not None:
            self.states.scatter(cache, rows, moved)
        return output.last_hidden_state

    # -- Starting

    def copy(self, starts: Items[Start]) -> None:
        """Copy pages and states for members that leave a prefix others still need."""
        size = self.pages.page_size
        pages = [s.page for s in starts if s.page is not None]
        if pages:
            offset = torch.arange(size, device=self.device)
            source, target = (self._to_device(list(p)) for p in zip(*pages, strict=True))
            source, target = ((p.unsqueeze(1) * size + offset).flatten() for p in (source, target))
            self.sites.pool.copy(source, target)
            self.sites.capture.copy(source, target)
        rows = [s.row for s in starts if s.row is not None]
        if rows:
            source, target = (self._to_device(list(r)) for r in zip(*rows, strict=True))
            self.states.copy(source, target)

    def sample_first(self, starts: Items[Start]) -> Sampled:
        """Sample a token for each start from its prefix's last hidden state."""
        hidden = torch.stack([s.prefix.hidden for s in starts if s.prefix.hidden is not None])
        sequences = [s.sequence for s in starts]
        draw = draw_of(sequences, [s.length for s in sequences], self.device)
        logits = self.head(hidden)
        result = _with_top(sample(logits, draw, _truncates(sequences)), logits, draw, _top(sequences))
        return Flight(sequences, result[0], False, 0, *_depart(result)).land()

    # -- Decode

    def launch(self, sequences: Items[Sequence], before: Flight | None = None) -> Flight:
        """Forward the newest token of each sequence and sample the next, without waiting for the result.

        Args:
            sequences: those that decode.
            before: the step in flight, whose tokens the host does not know yet.
        """
        if before is not None and before.sequences == sequences and self.inputs.follows(sequences):
            return self._launch_again(before)
        places = {} if before is None else {id(s): i for i, s in enumerate(before.sequences)}
        rows = []
        for s in sequences:
            source = places.get(id(s), -1)
            rows.append(DecodeRow(s.last_token, s.length - (source < 0), s.pages, s, source))
        width = self.table_width(1 + max(row.position for row in rows))
        tokens = None if before is None else before.tokens
        return self._run(
            list(sequences), width, _truncates(sequences), _top(sequences), partial(self._fill, rows, tokens)
        )

    def _launch_again(self, before: Flight) -> Flight:
        """The sequences of the step in flight once more."""
        fill = partial(self.inputs.advance, before=before.tokens)
        width = self.table_width(1 + self.inputs.longest)
        return self._run(before.sequences, width, before.truncate, before.top, fill)

    def _fill(self, rows: Items[DecodeRow], tokens: Tensor | None, batch: int, width: int) -> DecodeInputs:
        return self.inputs.fill(rows, batch, width, tokens)

    def _run(
        self, sequences: list[Sequence], width: int, truncate: bool, top: int, fill: Callable[[int, int], DecodeInputs]
    ) -> Flight:
        count = len(sequences)
        if self.graphs is not None and self.graphs.fits(count):
            self.graph_steps += 1
            result = self.graphs.replay(count, width, truncate, top, fill)
        else:
            result = self.decode_step(fill(count, width), truncate, top)
        return Flight(sequences, result[0], truncate, top, *_depart(result))

    def decode_step(self, inputs: DecodeInputs, truncate: bool, top: int = 0) -> tuple[Tensor, ...]:
        """The captured part: tokens ``(B,)`` int64 and log-probabilities ``(B,)`` float32 from static buffers.

        With ``top``, also ids ``(B, top)`` and log-probabilities ``(B, top)`` of the likeliest tokens.
        """
        size, pages = self.pages.page_size, inputs.pages
        slots, lengths, tickets = inputs.place(size, self.sites.capture)
        rows = inputs.state_rows if self.states.needed else None
        context = cache(partial(slots_of_pages, pages, size))
        batch = DecodeBatch(slots, tickets, context, lengths, pages, size, rows)
        hidden = self._forward(inputs.tokens.unsqueeze(1), inputs.positions.unsqueeze(1), batch, rows, rows)
        self.sites.check_calls(decode=True)
        logits, draw = self.head(hidden[:, 0]), inputs.draw(lengths)
        return _with_top(self._sample(logits, draw, truncate), logits, draw, top)

    def table_width(self, longest: int) -> int:
        """Pages of the block tables of a step whose longest sequence has ``longest`` tokens."""
        # A GPU prefers few shapes; a CPU prefers not to read what is masked.
        length = longest if self.device.type == "cpu" else bucket_length(longest)
        return min(self.pages.pages_for(length), self.inputs.max_width)

    def _to_device(self, values: list) -> Tensor:
        return upload(np.array(values, np.int64), self.device)


def bucket_length(tokens: int) -> int:
    """Context length that a decode step gathers when its longest sequence has ``tokens`` tokens.

    Multiples of 64 up to 512, then of 128 up to 1024, and so on: lengths that differ by less than an eighth are padded
    to the same one.
    """
    step = 64
    while tokens > 8 * step:
        step *= 2
    return -(-tokens // step) * step


def _truncates(sequences: Items[Sequence]) -> bool:
    return any(s.request.sampling.top_k > 0 or s.request.sampling.top_p < 1.0 for s in sequences)


def _top(sequences: Items[Sequence]) -> int:
    return max(s.request.sampling.top_logprobs for s in sequences)


def _with_top(sampled: tuple[Tensor, Tensor], logits: Tensor, draw: Draw, top: int) -> tuple[Tensor, ...]:
    """What was sampled, and the likeliest tokens if they were asked for."""
    return (*sampled, *top_logprobs(logits, draw, top)) if top else sampled


def _depart(result: tuple[Tensor, ...]) -> tuple[Tensor, torch.cuda.Event | None]:
    """Send a step's result to the host in one copy. A token id is exact in float64."""
    tokens, logprobs, *top = result
    columns = [tokens.double()[:, None], logprobs.double()[:, None], *(part.double() for part in top)]
    rows = torch.cat(columns, dim=1)
    if rows.device.type != "cuda":
        return rows.cpu(), None
    there = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    there.copy_(rows, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return there, arrival
