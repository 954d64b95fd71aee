"""Micro-batches: right-padded rows of tokens, and the guidance that belongs to each row.

Sequences are padded on the right and never packed into one row: attention is causal and layers with a recurrent state
(gated delta nets) ignore sequence bounds, so padding that comes *after* every real token can influence nothing. Sorting
by length keeps the padding small.

Row ``t`` of a sequence is the forward pass of token ``t`` and predicts token ``t + 1``; a rollout of ``N`` tokens gives
``N - 1`` rows (:mod:`tracefp4.core`). Guidance, routes and tokens share that index, so nothing is ever shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tracefp4.core import Site, SiteShape, TopLogprobs
from tracefp4.errors import GuidanceMismatch
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord
from tracefp4.guidance.runs import SiteRuns
from tracefp4.training.pulls import Pulls
from tracefp4.training.staging import stack_sites


@dataclass(slots=True)
class Example:
    """One sequence to train on or to score."""

    tokens: tuple[int, ...]
    """Prompt and response ids, ``N`` of them."""
    prompt_length: int
    """Tokens that were given; the rest were sampled."""
    rollout_logprobs: tuple[float, ...] = ()
    """One for each response token."""
    advantage: float = 0.0
    """The same for every response token."""
    index: int = 0
    """Position in the caller's list."""
    record: Record | None = None
    """Guidance of its ``N - 1`` rows."""
    routes: Tensor | None = None
    """``(N - 1, moe_layers, top_k)`` expert ids of the rollout."""
    top: TopLogprobs | None = None
    """The sampler's likeliest tokens at each response position."""

    @property
    def rows(self) -> int:
        """Rows that are forwarded."""
        return len(self.tokens) - 1


@dataclass(slots=True)
class GuidedRows:
    """Guidance of one micro-batch with ``R = B * S`` rows."""

    guided: Tensor
    """``(R,)`` bool: the row has guidance."""
    complete: bool
    """Every real row is guided; then the sites need not compute the unguided rounding."""
    count: int
    """Rows that are guided."""
    sites: Mapping[Site, SiteRecord]
    """Recorded outcomes with ``R`` rows, on the device; rows that are not guided hold zeros and are never read. Checks
    of congruent scales have one row a sequence, ``(B, ceil(S / 16))``."""
    pulls: Pulls | None = None
    """Finds the bits of codes where checks were recorded in their place."""

    def vectors(self, shape: SiteShape, rows: Tensor | None) -> Tensor:
        """Which vectors of a site are guided: bool ``(R * vectors,)``, or in the order of ``rows`` if given."""
        mask = self.guided.repeat_interleave(shape.vectors)
        return mask if rows is None else mask[rows]

    def settle(self) -> None:
        """Be like guidance whose bits came along, after a forward pass that has reached every site.

        Raises:
            GuidanceCorrupt: bits that were pulled do not pass their checks.
        """
        if self.pulls is not None:
            self.pulls.confirm()
            self.sites, self.pulls = SiteRuns.of(self.sites).settled(), None


@dataclass(slots=True)
class Routes:
    """Expert routes of one micro-batch. They are the same in a layer's forward pass and when it is computed again."""

    experts: Tensor
    """``(moe_layers, B * S, top_k)`` int64."""
    known: Tensor | None
    """``(moe_layers, B * S, 1)`` bool: the route was recorded; elsewhere a router keeps its own choice. ``None``: all
    were, and padding has the routes of real rows, over which it is spread evenly."""
    layers: tuple[Tensor, ...] = field(init=False)
    """``experts`` by layer, always the same objects."""

    def __post_init__(self) -> None:
        self.layers = self.experts.unbind(0)


@dataclass(slots=True)
class MicroBatch:
    """``B`` sequences, padded on the right to ``S`` rows."""

    input_ids: Tensor
    """``(B, S)`` int64."""
    position_ids: Tensor
    """``(B, S)`` int64, ``0..S-1`` in each row."""
    targets: Tensor
    """``(B, S)`` int64: the next token."""
    response: Tensor
    """``(B, S)`` bool: the target is a response token."""
    real: Tensor
    """``(B, S)`` bool: not padding."""
    rollout_logprobs: Tensor
    """``(B, S)`` float32, 0 outside the response."""
    advantages: Tensor
    """``(B, S)`` float32, 0 outside the response."""
    index: tuple[int, ...]
    """Caller's positions."""
    lengths: tuple[int, ...]
    """Rows of each sequence that are not padding, on the host."""
    places: Tensor
    """``(T,)`` int64: where the response tokens stand among the ``B * S`` rows. Their number is known when the batch is
    made, so nobody has to wait for the device to learn it."""
    guidance: GuidedRows | None
    routes: Routes | None
    top: TopLogprobs | None = None
    """The sampler's likeliest tokens: ids int64 and log-probs float32 ``(T, k)``, ``T`` the response tokens row by row,
    on the device; ``None`` unless every example has them."""


def plan_micro_batches(
    examples: Sequence[Example], max_tokens: int, width: Callable[[int], int] | None = None
) -> list[list[Example]]:
    """Group examples so that no micro-batch exceeds ``max_tokens`` padded rows (a longer single one stands alone).

    Longest first, so that the first micro-batch already shows whether the memory suffices. Deterministic. ``width``
    says to how many rows a sequence is padded that has the most of its micro-batch; ``None``: to those.
    """
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: (-e.rows, e.index)):
        most = 0 if not groups else groups[-1][0].rows if width is None else width(groups[-1][0].rows)
        if groups and (len(groups[-1]) + 1) * most <= max_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def collate(examples: Sequence[Example], device: torch.device, pad_id: int = 0) -> MicroBatch:
    """Build a micro-batch on ``device``.

    Raises:
        GuidanceMismatch: a record, its routes or its log-probs do not have one entry for each row or response token.
    """
    for e in examples:
        _check(e)
    batch, width = len(examples), max(e.rows for e in examples)
    # First, because its copies go on while the host lays out everything else.
    guidance = _stack_guidance(examples, width, device)
    ids = torch.full((batch, width), pad_id, dtype=torch.int64)
    targets = torch.full((batch, width), pad_id, dtype=torch.int64)
    response, real = torch.zeros(batch, width, dtype=torch.bool), torch.zeros(batch, width, dtype=torch.bool)
    logprobs, advantages = torch.zeros(batch, width), torch.zeros(batch, width)
    for b, e in enumerate(examples):
        tokens = torch.tensor(e.tokens, dtype=torch.int64)
        ids[b, : e.rows], targets[b, : e.rows] = tokens[:-1], tokens[1:]
        real[b, : e.rows] = True
        response[b, e.prompt_length - 1 : e.rows] = True
        advantages[b, e.prompt_length - 1 : e.rows] = e.advantage
        if e.rollout_logprobs:
            logprobs[b, e.prompt_length - 1 : e.rows] = torch.tensor(e.rollout_logprobs)
    positions, places = torch.arange(width).expand(batch, width), response.flatten().nonzero().squeeze(-1)
    routes = _stack_routes(examples, width, device)
    move = {"device": device, "non_blocking": True}
    made = MicroBatch(
        input_ids=ids.to(**move),
        position_ids=positions.to(**move),
        targets=targets.to(**move),
        response=response.to(**move),
        real=real.to(**move),
        rollout_logprobs=logprobs.to(**move),
        advantages=advantages.to(**move),
        index=tuple(e.index for e in examples),
        lengths=tuple(e.rows for e in examples),
        places=places.to(**move),
        guidance=guidance,
        routes=routes,
        top=_stack_top(examples, device),
    )
    if guidance is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # nobody keeps the frames after this
    return made


def filler(device: torch.device) -> MicroBatch:
    """A micro-batch of no example: one row that a rank without examples forwards, because the others wait for it.

    Its ``index`` is empty; whatever a loss makes of it must be multiplied by 0.
    """
    return replace(collate([Example(tokens=(0, 0), prompt_length=1)], device), index=())


def _check(e: Example) -> None:
    if not 0 < e.prompt_length < len(e.tokens):
        raise GuidanceMismatch(
            f"sequence {e.index}: prompt of {e.prompt_length} in {len(e.tokens)} tokens leaves no response"
        )
    if e.rollout_logprobs and len(e.rollout_logprobs) != len(e.tokens) - e.prompt_length:
        raise GuidanceMismatch(
            f"sequence {e.index}: {len(e.rollout_logprobs)} log-probs for "
            f"{len(e.tokens) - e.prompt_length} response tokens"
        )
    if e.top is not None and len(e.top.ids) != len(e.tokens) - e.prompt_length:
        raise GuidanceMismatch(
            f"sequence {e.index}: likeliest tokens of {len(e.top.ids)} positions for "
            f"{len(e.tokens) - e.prompt_length} response tokens"
        )
    for name, count in (("guidance", e.record and e.record.rows), ("routes", e.routes is not None and len(e.routes))):
        if count and count != e.rows:
            raise GuidanceMismatch(f"sequence {e.index}: {name} has {count} rows, the sequence {e.rows}")


def _stack_top(examples: Sequence[Example], device: torch.device) -> TopLogprobs | None:
    known = [e.top for e in examples if e.top is not None]
    if len(known) < len(examples):
        return None
    ids = torch.cat([top.ids for top in known]).to(torch.int64)
    return TopLogprobs(ids.to(device), torch.cat([top.logprobs for top in known]).to(device))


def _stack_routes(examples: Sequence[Example], width: int, device: torch.device) -> Routes | None:
    known = next((e.routes for e in examples if e.routes is not None), None)
    if known is None:
        return None
    routes = torch.full((len(examples), width, *known.shape[1:]), -1, dtype=torch.int16)
    for b, e in enumerate(examples):
        if e.routes is not None:
            mine = e.routes.to(torch.int16)
            routes[b, : e.rows] = mine
            for start in range(e.rows, width, e.rows):
                routes[b, start : start + e.rows] = mine[: width - start]
    complete = bool(routes.amin() >= 0)  # of everything at once: by row it takes the host several times as long
    experts = routes.to(device, non_blocking=True).flatten(0, 1).transpose(0, 1).contiguous()
    known_rows = None if complete else (experts >= 0).all(-1, keepdim=True)
    return Routes(experts.to(torch.int64), known_rows)


def _stack_guidance(examples: Sequence[Example], width: int, device: torch.device) -> GuidedRows | None:
    known = next((e.record for e in examples if e.record is not None), None)
    if known is None:
        return None
    guided = torch.zeros(len(examples), width, dtype=torch.bool)
    complete = True
    for b, e in enumerate(examples):
        if e.record is not None:
            guided[b, : e.rows] = e.record.valid
        complete = complete and bool(guided[b, : e.rows].all())
    rows = guided.flatten().to(device, non_blocking=True)
    sites = stack_sites([e.record for e in examples], known, width, device)
    pulls, plan, count = None, Plan.recorded(known.plan), int(guided.sum())
    if plan.checked:
        pulls = Pulls(plan.bits, [None if e.record is None else e.record.source for e in examples], width, count)
    return GuidedRows(rows, complete, count, sites, pulls)
