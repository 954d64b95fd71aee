"""Forward and backward pass of the decoder as two CUDA graphs.

A training step of a small model waits for Python: 5,000 launches of some ten microseconds each leave a GPU idle for two
thirds of the time. A CUDA graph replays what was launched once, at the same addresses, for the price of one launch. So
everything that changes from one micro-batch to the next has to lie in tensors that stay:

    embeddings, routes, guidance    copied in before each replay
    operands of quantized weights   made anew in place after each optimizer step (:mod:`tracefp4.training.weights`)
    weights                         the optimizer writes into them

and everything that Python decides has to be the same: the padded size, which sites are guided, whether all rows are.
Micro-batches are padded to a few sizes, and each size gets a *program*, a pair of graphs, when it is first met. What is
padded repeats real rows, so that it costs nothing to think of: no real token sees it, it is given no gradient, and
routes stay spread over the experts. Embedding, output head and loss are left to Python, whose shapes they may have.

Bits of a checked plan are pulled when the host has seen which are needed (:mod:`tracefp4.training.pulls`), which no
graph can wait for. A forward pass without gradients finds them first, step by step; then the micro-batch is like one
whose bits came along.

Graphs share one pool of memory, since only one micro-batch is in flight; running another forward before the backward
pass of the last one is refused. They are not used where layers are recomputed, where an observer wants to see codes, or
without gradients.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tracefp4.errors import TrainingError
from tracefp4.guidance.codec import chunks
from tracefp4.models.repeated import Capture, Repeated, Replay, cuda_graphs, first_line
from tracefp4.training.batch import GuidedRows, Routes
from tracefp4.training.rooms import copy_guidance, kind_of, room_for_guidance, room_for_routes
from tracefp4.training.sites import TrainerSites

KEPT = 8
"""Programs kept; the one unused for longest goes first."""
NARROWEST = 32
"""Rows that a sequence is padded to at least."""


class Aside(Protocol):
    """A loss of its own that a forward pass leaves beside its hidden states, such as that of routers."""

    def start(self) -> None:
        """A forward pass begins."""
        ...

    def take(self, real: Tensor) -> Tensor:
        """The loss, a scalar, of the pass that ended; ``real (B, S)`` bool marks tokens that count."""
        ...


def padded_width(rows: int) -> int:
    """Rows to which sequences of ``rows`` are padded: at most an eighth of a power of two more, so sizes are few."""
    step = max(NARROWEST, 1 << max((rows - 1).bit_length() - 3, 0))
    return -(-rows // step) * step


@dataclass(slots=True)
class _Program:
    """The graphs of one size, and the tensors that they read and write."""

    embeds: Tensor
    """``(B, S, H)``, a leaf."""
    guidance: GuidedRows | None
    routes: Routes | None
    reads: Hashable
    """See :meth:`DecoderGraphs._reads`."""
    grad: Tensor
    """``(B, S, H)``: gradient of :attr:`hidden`."""
    real: Tensor
    """``(B, S)`` bool: not padding."""
    aside_grad: Tensor
    """Scalar: gradient of :attr:`aside`."""
    hidden: Tensor = field(init=False)
    forward: Replay = field(init=False)
    backward: Replay = field(init=False)
    grads: list[Tensor | None] = field(init=False)
    """Of the embeddings, then of each parameter."""
    aside: Tensor | None = None
    """Scalar: the loss beside."""
    counts: Tensor | None = None
    """``(2,)``: chunks of congruent scales that were checked, and that failed."""
    runs: int = 0
    """Forward passes so far."""


class DecoderGraphs:
    """Graphs of one bound model.

    Args:
        model: a causal language model of transformers, bound to ``sites``; not sharded, layers not recomputed.
        sites: the trainer's.
        tokens: padded tokens of a micro-batch.
        capture: how a function is captured; CUDA graphs in one pool unless a test says otherwise.
        aside: a loss beside the hidden states; it is left in :attr:`beside`.

    Raises:
        TrainingError: see :func:`refusal`.
    """

    def __init__(
        self,
        model: Any,
        sites: TrainerSites,
        tokens: int,
        capture: Capture | None = None,
        aside: Aside | None = None,
    ) -> None:
        problem = refusal(model, sites, capture is None)
        if problem is not None:
            raise TrainingError(f"the decoder cannot run as CUDA graphs: {problem}")
        self._decoder, self._sites, self._tokens, self._aside = model.get_decoder(), sites, tokens, aside
        self._embedding: nn.Module = model.get_input_embeddings()
        self._capture = cuda_graphs() if capture is None else capture
        own = {id(p) for p in self._embedding.parameters()}
        named = {n: p for n, p in self._decoder.named_parameters() if p.requires_grad and id(p) not in own}
        self._params = list(named.values())
        # The same memory under other names. Autograd waits for the stream on which it first met a leaf, and those of
        # the model it has met elsewhere: a capture must not wait for what is not captured.
        self._leaves = {n: p.detach().requires_grad_() for n, p in named.items()}
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()
        self._maps: dict[tuple[int, ...], Tensor] = {}
        self._renewal = Repeated(self._capture)
        self.failure: str | None = None
        """Why there are no graphs; everything is computed step by step since."""
        self.beside: Tensor | None = None
        """The loss beside the last hidden states; ``None`` where those were computed step by step."""

    def hidden(self, input_ids: Tensor, real: Tensor) -> Tensor | None:
        """Last hidden states ``(B, S, H)`` of the micro-batch that is attached to the sites.

        ``None`` where it has to be computed step by step: gradients are off, an observer is there, or the batch is
        larger than a micro-batch.

        Args:
            input_ids: ``(B, S)`` int64.
            real: ``(B, S)`` bool, not padding.

        Raises:
            GuidanceMissing: bits are to be pulled, and there is nobody to ask.
            GuidanceCorrupt: bits that were pulled do not pass their checks.
        """
        sites, self.beside = self._sites, None
        size = self._size(*input_ids.shape)
        if size is None or self.failure or sites.observer is not None or not torch.is_grad_enabled():
            return None
        self.renew()
        if self.failure:
            return None
        if sites.guidance is not None and sites.guidance.pulls is not None:
            self._find_bits(sites.guidance, input_ids)
        embeds = self._embedding(input_ids)
        try:
            program = self._program(size, embeds, real)
        except RuntimeError as error:  # what CUDA says where something waits for the device
            return self._give_up(first_line(error))
        hidden, beside = _Replay.apply(self, program, real, embeds, *self._params)
        self.beside = None if program.aside is None else beside
        return hidden

    def renew(self) -> None:
        """Make the operands of weights that have changed anew; also done before a forward pass that needs them.

        Launching that one by one takes many times as long as the kernels, so it is a graph as well. Where there is
        something else to do for the host, such as making the first micro-batch, begin with this.
        """
        weights = self._sites.weights
        if self.failure or not weights.stale():
            return
        if not weights.rewritable:
            weights.refresh()
            return

        def rewrite() -> list[Tensor]:
            weights.rewrite()
            return []

        self._renewal.run(self._reads(), rewrite)
        weights.rewritten()
        if self._renewal.failure is not None:
            self._give_up(self._renewal.failure)

    def _find_bits(self, guidance: GuidedRows, input_ids: Tensor) -> None:
        """Settle a checked plan; the checks of scales are counted in the pass that trains."""
        if not all(record.bits for record in guidance.sites.values()):  # an observer's pass may have found them
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
            with torch.no_grad(), self._sites.standing_in(guidance, self._sites.routes):
                self._decoder(input_ids=input_ids, position_ids=positions, use_cache=False)
        guidance.settle()

    def _give_up(self, why: str) -> None:
        self.failure = why
        warnings.warn(f"training goes on without CUDA graphs: {why}", RuntimeWarning, stacklevel=3)

    def _reads(self) -> Hashable:
        """What graphs read from fixed addresses."""
        return self._sites.weights.generation, tuple(p.data_ptr() for p in self._params)

    def __len__(self) -> int:
        """Programs that are kept."""
        return len(self._programs)

    def _size(self, batch: int, rows: int) -> tuple[int, int] | None:
        width = padded_width(rows)
        most = max(1, self._tokens // width)
        return (most, width) if batch <= most else None

    def _program(self, size: tuple[int, int], embeds: Tensor, real: Tensor) -> _Program:
        guidance, routes = self._sites.guidance, self._sites.routes
        key = (size, embeds.dtype, kind_of(guidance), None if routes is None else (routes.known is None))
        program = self._programs.get(key)
        if program is None or program.reads != self._reads():
            self._programs.pop(key, None)
            program = self._make(size, embeds, real)
            self._programs[key] = program
            if len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return program

    def load(self, program: _Program, embeds: Tensor, real: Tensor) -> None:
        """Copy the attached micro-batch into a program's tensors."""
        (batch, rows), (most, width) = embeds.shape[:2], program.embeds.shape[:2]
        places = self._map(batch, rows, most, width)
        with torch.no_grad():
            torch.index_select(embeds.detach().flatten(0, 1), 0, places, out=program.embeds.detach().flatten(0, 1))
        sites = self._sites
        if self._aside is not None:
            program.real.zero_()
            program.real[:batch, :rows] = real
        if program.routes is not None and sites.routes is not None:
            torch.index_select(sites.routes.experts, 1, places, out=program.routes.experts)
            if program.routes.known is not None and sites.routes.known is not None:
                torch.index_select(sites.routes.known, 1, places, out=program.routes.known)
        if program.guidance is not None and sites.guidance is not None:
            cut = self._map(batch, chunks(rows), most, chunks(width))
            copy_guidance(sites.guidance, program.guidance, (batch, rows), (most, width), places, cut)

    def replayed(self, program: _Program) -> None:
        """Account for a forward pass of a program."""
        program.runs += 1
        if program.counts is not None:
            self._sites.checks.add(program.counts)

    def _map(self, batch: int, rows: int, most: int, width: int) -> Tensor:
        """For each place of ``(most, width)`` the place of ``(batch, rows)`` that it holds; int64."""
        key = (batch, rows, most, width)
        if key not in self._maps:
            if len(self._maps) >= 256:
                self._maps.clear()
            sequence, row = torch.arange(most) % batch, torch.arange(width) % rows
            self._maps[key] = (sequence[:, None] * rows + row[None, :]).flatten().to(self._params[0].device)
        return self._maps[key]

    def _make(self, size: tuple[int, int], embeds: Tensor, real: Tensor) -> _Program:
        shape = (*size, embeds.shape[2])
        device, sites = embeds.device, self._sites
        guidance, routes = sites.guidance, sites.routes
        program = _Program(
            embeds=torch.zeros(shape, dtype=embeds.dtype, device=device).requires_grad_(),
            guidance=None if guidance is None else room_for_guidance(guidance, size),
            routes=None if routes is None else room_for_routes(routes, size[0] * size[1]),
            reads=None,
            grad=torch.zeros(shape, dtype=embeds.dtype, device=device),
            real=torch.zeros(size, dtype=torch.bool, device=device),
            aside_grad=torch.zeros((), device=device),
        )
        self.load(program, embeds, real)
        kept: list[Tensor] = []
        used: list[bool] = []

        def forward() -> list[Tensor]:
            positions = torch.arange(size[1], device=device).unsqueeze(0)
            given = {"inputs_embeds": program.embeds, "position_ids": positions, "use_cache": False}
            if self._aside is not None:
                self._aside.start()
            with torch.enable_grad(), sites.standing_in(program.guidance, program.routes) as checks:
                result = functional_call(self._decoder, self._leaves, kwargs=given)
                counts = checks.total()
                kept[:] = [result.last_hidden_state]
                if self._aside is not None:
                    kept.append(self._aside.take(program.real))
            return [*(part.detach() for part in kept), *([] if counts is None else [counts])]

        def backward() -> list[Tensor]:
            wanted, given = [program.embeds, *self._leaves.values()], [program.grad, program.aside_grad]
            found = torch.autograd.grad(kept, wanted, given[: len(kept)], allow_unused=True)
            used[:] = [grad is not None for grad in found]
            return [grad for grad in found if grad is not None]

        # The first run compiles kernels and makes weight operands, which a capture could not.
        captured = self._capture([forward, backward])
        ((program.hidden, *more), program.forward), (grads, program.backward) = captured
        kept.clear()
        if self._aside is not None:
            program.aside = more.pop(0)
            self._aside.start()
        rest = iter(grads)
        program.grads = [next(rest) if is_used else None for is_used in used]
        program.counts = more[0] if more else None
        program.reads = self._reads()
        return program


class _Replay(torch.autograd.Function):
    """Replays a program; the gradient replays its other half."""

    @staticmethod
    def forward(
        ctx: Any, graphs: DecoderGraphs, program: _Program, real: Tensor, embeds: Tensor, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of the attached micro-batch and the loss beside, or 0; ``params`` only receive gradients."""
        graphs.load(program, embeds, real)
        program.forward()
        graphs.replayed(program)
        ctx.program, ctx.run, ctx.size = program, program.runs, embeds.shape[:2]
        batch, rows = ctx.size
        aside = torch.zeros_like(program.aside_grad) if program.aside is None else program.aside.clone()
        return program.hidden[:batch, :rows].clone(), aside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the embeddings and of the parameters."""
        program, (batch, rows) = ctx.program, ctx.size
        if ctx.run != program.runs:
            raise TrainingError("a micro-batch was begun before the backward pass of the one before it")
        program.grad.zero_()
        program.grad[:batch, :rows] = grads[0]
        program.aside_grad.copy_(grads[1])
        program.backward()
        embeds, *params = program.grads
        # Names of their own for the same memory: whoever adds them up has to do so before the next replay.
        mine = (
            None if grad is None else grad.clone() if grad.dtype is torch.float32 else grad.detach() for grad in params
        )
        return None, None, None, None if embeds is None else embeds[:batch, :rows].clone(), *mine


def refusal(model: Any, sites: TrainerSites, cuda: bool = True) -> str | None:
    """Why a model cannot run as graphs, as part of a sentence; ``None`` if it can."""
    device = next(model.parameters()).device
    if cuda and device.type != "cuda":
        return f"the model is on {device.type}"
    if sites.weights.cache == "packed":
        return "operands of packed weights are made for each layer anew"
    if sites.layout.deltas:
        return "its layers with a recurrent state choose their mask on the host"
    return None
