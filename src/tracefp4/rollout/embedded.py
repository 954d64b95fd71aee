"""The embedded engine: a small serving engine in the trainer's process, on a transformers model.

One step, which is everything that ever happens::

    scheduler.prefill   waiting prompts get pages; some of their tokens are forwarded, packed into one row
    scheduler.start     samples of finished prompts share its pages and sample their first token
    scheduler.decode    every running sequence gets a slot for its newest token, is forwarded, and samples the next
    harvest             what ended has its rows gathered and gives its pages back; it is returned when they have arrived

The order and what runs ahead of what is :mod:`tracefp4.rollout.loop`'s.

It computes as a serving engine does: decode attends to one query a sequence over a paged pool of FP4 codes, prefill in
chunks, experts with FP4 weights and activations. It shares no intermediate result with a trainer, so the numerical gap
between the two is the real one.

The engine owns its model: parameters of experts are overwritten with their quantized values, or emptied where the
grouped kernel multiplies arranged codes (:mod:`tracefp4.rollout.sync`). Give it a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.core import Kind, Request, Rollout, TopLogprobs
from tracefp4.errors import EngineError, NonFiniteError, SyncError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.models.binding import bind, unbind
from tracefp4.models.coverage import Coverage, coverage
from tracefp4.models.layout import describe
from tracefp4.models.packing import PackedWeight
from tracefp4.rollout.admission import Limits, check_request, recorded_shapes, stored_plan
from tracefp4.rollout.capture import Capture
from tracefp4.rollout.engine import Capabilities, Digest, EngineStats
from tracefp4.rollout.harvest import Harvester
from tracefp4.rollout.loop import Loop
from tracefp4.rollout.pool import KVPool, PageAllocator, check_storable
from tracefp4.rollout.request import Sequence, StopRules, eos_token_ids
from tracefp4.rollout.runner import Runner
from tracefp4.rollout.sampler import stream_key
from tracefp4.rollout.scheduler import RESIDENT_STATES, Scheduler
from tracefp4.rollout.sites import EngineSites
from tracefp4.rollout.state import StatePool, check_continues
from tracefp4.rollout.state import state_dtype as dtype_of_states
from tracefp4.rollout.stepwise import StepwiseEngine
from tracefp4.rollout.sync import WeightSync


class EmbeddedEngine(StepwiseEngine):
    """Continuous batching over a paged FP4 KV pool, with capture. See :class:`tracefp4.rollout.engine.Engine`.

    Args:
        model: a transformers causal language model of the engine's own, not bound. Its dtype is what the engine
            computes in: bfloat16, or float32 to check something without rounding noise.
        tokenizer: decodes text to find stop strings, and names the end-of-sequence token; may be ``None``.
        spec: what is quantized.
        plan: what is recorded; ``None`` or the plan ``none`` for nothing.
        store: where guidance goes; needed with a plan.
        device: where the model is moved; ``None`` leaves it where it is.
        max_tokens: slots of the KV pool, a multiple of ``page_size``.
        page_size: tokens a page.
        max_batch: sequences that decode at once.
        prefill_chunk: prompt tokens a step.
        cuda_graphs: capture decode steps of small batches in CUDA graphs; without CUDA it has no effect.
        compile_decode: compile the decoder layers for decode steps (:mod:`tracefp4.rollout.compiled`), with the
            default backend or the one that is named.
        residual: share of each token's channels whose residual is added to the experts' inputs
            (:mod:`tracefp4.quantizers.residual`).
        state_dtype: what the recurrent matrices of linear attention are kept in, ``float32`` or ``bfloat16``.
        overlap: launch a decode step before the result of the last one is known; by default on a GPU. Tokens are the
            same either way.

    Raises:
        EngineError: settings that cannot work.
        ModelError: a model that cannot be bound, or whose linear layers keep states that the engine cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        spec: Spec,
        plan: Plan | None = None,
        store: Store | None = None,
        *,
        device: torch.device | str | None = None,
        max_tokens: int = 16384,
        page_size: int = 16,
        max_batch: int = 64,
        prefill_chunk: int = 2048,
        cuda_graphs: bool = True,
        compile_decode: bool | str = False,
        residual: float = 0.0,
        state_dtype: str = "float32",
        overlap: bool | None = None,
    ) -> None:
        plan = stored_plan(plan, store, serves_pulls=True)
        self._state_dtype = dtype_of_states(state_dtype)
        self._limits = Limits(max_tokens, page_size, max_batch, prefill_chunk)
        self._model: Any = model.to(device).eval() if device is not None else model.eval()
        self._model.requires_grad_(False)
        self.spec, self.plan = spec, plan
        self.layout = describe(model)
        embedding = self._model.get_input_embeddings()
        self.device, self._vocabulary = embedding.weight.device, embedding.num_embeddings
        if residual and spec.activations is None:
            raise EngineError(f"residual = {residual} compensates quantized activations; spec {spec.name!r} has none")
        graphs = cuda_graphs and self.device.type == "cuda"
        self._build(embedding.weight.dtype, store, graphs, compile_decode, residual)
        decode = None if tokenizer is None else _decoder(tokenizer)
        self._stops = StopRules(eos_token_ids(model, tokenizer), decode)
        run_ahead = self.device.type == "cuda" if overlap is None else overlap
        self._loop = Loop(self.scheduler, self._runner, self._stops, self._stats, run_ahead)
        self._version: int | None = 0
        self._arrivals = 0
        self._active: set[str] = set()

    def _build(
        self, dtype: torch.dtype, store: Store | None, cuda_graphs: bool, compiled: bool | str, residual: float
    ) -> None:
        limits, layout, device = self._limits, self.layout, self.device
        self.pages = PageAllocator(limits.max_tokens // limits.page_size, limits.page_size)
        slots = limits.max_tokens + limits.page_size
        shapes = recorded_shapes(layout, self.spec, self.plan)
        check_storable(self.spec)
        check_continues(self._model, layout)
        sites = EngineSites(layout, self.spec, limits.max_batch, residual)
        bind(self._model, sites, spec=self.spec)
        # Before the pool: what packing frees is there for K and V.
        self._weights = WeightSync(
            self._model, layout, self.spec.weights, sites.weight_scales, sites.kernel_weights, self.spec.bf16_layers
        )
        self.pool = KVPool(layout, self.spec, slots, dtype, device)
        self.capture = Capture(layout, shapes, 4 if self.plan is None else self.plan.bits, slots, device)
        self.states = StatePool(layout, limits.max_batch + RESIDENT_STATES, self._state_dtype)
        self.scheduler = Scheduler(self.pages, self.states, limits.max_batch, limits.prefill_chunk)
        sites.serve(self.pool, self.capture, self.states)
        self._max_length = int(self._model.get_submodule(layout.decoder).config.max_position_embeddings)
        self._runner = Runner(
            self._model,
            layout,
            sites,
            self.pages,
            self.states,
            limits.max_batch,
            self._max_length,
            device,
            cuda_graphs,
            compiled,
        )
        self._harvester = Harvester(self.capture, self.pool, self.pages, self.plan, self.spec.hash, store, device)
        self._stats = EngineStats()

    # -- Facts

    @property
    def model(self) -> nn.Module:
        """The engine's own model, to look at (coverage, layout). Only the engine can run it."""
        return self._model

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return Capabilities(
            name="embedded",
            kinds=frozenset(Kind(shape.site.kind) for shape in self.capture.table.shapes),
            routes=self.capture.routes is not None,
            truncated_sampling=True,
            stop_strings=self._stops.finds_text,
            cuda_graphs=self._runner.graphs is not None,
        )

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was built."""
        self._stats.retractions = self.scheduler.retractions
        self._stats.graph_steps = self._runner.graph_steps
        return self._stats

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return self._weights.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.pool.token_bytes

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return self._loop.busy or self._harvester.busy

    # -- Sampling

    def add(self, request: Request, *, guidance: bool = True) -> None:
        """Queue a request. Without a seed, the request's id is the seed.

        Raises:
            EngineError: it can never run, or its id is in flight.
            SyncError: see :attr:`weight_version`.
        """
        _ = self.weight_version
        self._check(request)
        if request.id in self._active:
            raise EngineError(
                f"a request {request.id!r} is in flight already; ids name what comes back, so they must differ"
            )
        seed = request.sampling.seed
        members = [
            Sequence(
                request=request,
                sample=sample,
                arrival=self._arrivals,
                stream=stream_key(request.id if seed is None else seed, sample),
                guidance=guidance and self.plan is not None,
            )
            for sample in range(request.samples)
        ]
        self._arrivals += 1
        self._active.add(request.id)
        self.scheduler.add(members)

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        """Forward one batch; return the rollouts that finished.

        Raises:
            NonFiniteError: the model's logits are NaN. Everything in flight is dropped, as after any error.
        """
        _ = self.weight_version
        with ExitStack() as undo:
            undo.callback(self._drop_everything)
            try:
                finished = self._step()
            except NonFiniteError as error:
                raise NonFiniteError(f"{error} under weights of version {self._version}") from None
            undo.pop_all()
        return finished

    def _step(self) -> list[Rollout]:
        self._stats.steps += 1
        if self._loop.waited_for:
            self._loop.land()
            self._gather()
            self._loop.begin()
        self._loop.decode()
        if self._loop.due:
            self._gather()
        # What was gathered behind the step in flight comes with a later one, unless there is none to be had.
        return self._hand_out(wait=not self._loop.busy)

    def _gather(self) -> None:
        """Gather what was recorded of the sequences that ended, and give their pages away."""
        ended = self._loop.take()
        try:
            self._harvester.gather(ended, self.weight_version)
        finally:
            for sequence in ended:
                self.scheduler.finish(sequence)

    def _hand_out(self, *, wait: bool) -> list[Rollout]:
        """Rollouts of what was gathered and has arrived, or of all of it."""
        rollouts = []
        for sequence, found in self._harvester.take(wait=wait):
            self._stats.finished += 1
            self._stats.guidance_bytes += found.guidance.nbytes if found.guidance is not None else 0
            self._stats.invalid_rows += found.invalid_rows
            rollouts.append(self._rollout(sequence, found.routes, found.guidance))
        if rollouts:
            self._active = self._loop.request_ids | self._harvester.request_ids
        return rollouts

    def _rollout(self, sequence: Sequence, routes: Tensor | None = None, guidance: Any = None) -> Rollout:
        return Rollout(
            request_id=sequence.request.id,
            sample=sequence.sample,
            prompt_ids=sequence.request.prompt_ids,
            response_ids=tuple(sequence.response),
            logprobs=tuple(sequence.logprobs),
            weight_version=self.weight_version,
            finish_reason=sequence.finish or "abort",
            routes=routes,
            guidance=guidance,
            top=_top_logprobs(sequence),
        )

    def abort(self, request_id: str) -> list[Rollout]:
        """Give up on a request: its samples that were not returned yet, with the tokens they had.

        They carry neither routes nor guidance.

        Raises:
            EngineError: no such request is in flight.
        """
        if request_id not in self._active:
            raise EngineError(f"no request {request_id!r} is in flight ({len(self._active)} are)")
        dropped = self._loop.abort(request_id) + self._harvester.drop(request_id)
        self._stats.aborted += len(dropped)
        self._active.discard(request_id)
        return [self._rollout(sequence) for sequence in sorted(dropped, key=lambda s: s.sample)]

    def _check(self, request: Request) -> None:
        check_request(request, self._limits, self._max_length, self._vocabulary)
        self._stops.check(request)

    def _drop_everything(self) -> None:
        self._loop.clear()
        self._harvester.clear()
        self._active.clear()

    # -- Weights

    def sync(self, state: Mapping[str, Tensor | PackedWeight], version: int) -> Digest:
        """Take new weights; see :meth:`tracefp4.rollout.engine.Engine.sync`. Nothing is cached across versions."""
        if self.busy:
            raise SyncError(
                f"{len(self._active)} requests are in flight; a rollout must come from one version of the weights"
            )
        self._version = None
        nbytes = self._weights.load(state)
        digest = self._weights.digest()
        self._version = version
        self._stats.syncs += 1
        self._stats.sync_bytes += nbytes
        return digest

    def digest(self) -> Digest:
        """Checksum of the weights it serves; equal to :func:`tracefp4.models.packing.model_digest` of the trainer's."""
        _ = self.weight_version
        return self._weights.digest()

    def coverage(self) -> Coverage:
        """What it quantizes, by module; see :func:`tracefp4.models.coverage.coverage`."""
        return coverage(self._model, self.spec)

    def close(self) -> None:
        """Drop what is in flight and take the site objects off the model, whose experts hold no weights of use."""
        self._drop_everything()
        unbind(self._model)


def _top_logprobs(sequence: Sequence) -> TopLogprobs | None:
    if not sequence.top:
        return None
    both = torch.stack(sequence.top)
    return TopLogprobs(both[:, 0].to(torch.int32), both[:, 1].float())


def _decoder(tokenizer: Any) -> Callable[[Items[int]], str]:
    def decode(ids: Items[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode
