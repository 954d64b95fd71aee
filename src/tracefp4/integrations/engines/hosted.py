"""An engine in another process, behind the interface that the loop knows.

Everything that does not depend on which engine it is happens here: refusing requests that cannot run, naming samples,
taking frames and routes out of the shared folder, weight versions, statistics, and the proof after a sync. A subclass
names its backend and says what it cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracefp4.config import EngineConfig
from tracefp4.core import Kind, Request, Rollout, SamplingParams
from tracefp4.errors import EngineError, SyncError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record
from tracefp4.guidance.store import Store, make_key
from tracefp4.integrations.engines.coverage import engine_coverage
from tracefp4.integrations.engines.handover import Folder
from tracefp4.integrations.engines.process import HostProcess
from tracefp4.integrations.engines.receipt import count, discard, receive
from tracefp4.integrations.engines.refit import push_weights
from tracefp4.integrations.engines.selfcheck import SelfCheck, probe_prompt, self_check
from tracefp4.integrations.engines.settings import EngineSettings, dump_spec
from tracefp4.integrations.engines.sites import check_plan
from tracefp4.integrations.engines.weights import Names, hollow
from tracefp4.integrations.engines.wire import Abort, Ask, Failed, Finished, Report, Sample
from tracefp4.models.coverage import Coverage
from tracefp4.models.directory import quiet
from tracefp4.models.packing import PackedWeight
from tracefp4.rollout.admission import Limits, check_request, recorded_shapes, stored_plan
from tracefp4.rollout.engine import Capabilities, Digest, EngineStats
from tracefp4.rollout.request import eos_token_ids
from tracefp4.rollout.sampler import stream_key
from tracefp4.rollout.stepwise import StepwiseEngine

START_LIMIT = 600.0
"""Seconds that an engine has to start."""


class HostedEngine(StepwiseEngine):
    """Base of the engines in other processes. See :class:`tracefp4.rollout.engine.Engine`.

    Args:
        model: whose architecture and first weights are served. Its folder is written for the engine to read; the model
            itself is not kept.
        tokenizer: names the end-of-sequence token; may be ``None``.
        spec: what is quantized.
        plan: what is recorded; ``None`` for nothing.
        store: where guidance goes in the end; needed with a plan.
        settings: sizes, and options of the engine under its own names.

    Raises:
        EngineError: settings or a model that the engine cannot serve, or it did not start.
    """

    name = "hosted"
    backend = ""
    """``module:class`` of a :class:`~tracefp4.integrations.engines.host.Backend`."""
    path = "emulation"
    """Line of the capability table that this engine takes."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        spec: Spec,
        plan: Plan | None,
        store: Store | None,
        settings: EngineConfig,
    ) -> None:
        plan = stored_plan(plan, store)
        if spec.bf16_layers:
            raise EngineError(
                f"engine {self.name!r} is told one format for all layers; spec {spec.name!r} leaves "
                f"{spec.bf16_layers} of them in bfloat16, which engine 'embedded' can"
            )
        self.spec, self.plan, self._store = spec, plan, store
        self._limits = Limits(settings.max_tokens, settings.page_size, settings.max_batch, settings.prefill_chunk)
        source: Any = model
        embedding = source.get_input_embeddings()
        self._dtype, self._vocabulary = embedding.weight.dtype, embedding.num_embeddings
        self._device = embedding.weight.device
        self._names = Names(hollow(model))
        self.layout = self._names.layout
        self._shapes = recorded_shapes(self.layout, spec, plan)
        self._max_length = int(source.get_submodule(self.layout.decoder).config.max_position_embeddings)
        self._eos = sorted(eos_token_ids(model, tokenizer))
        self.check_model(model, spec)
        self._stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, tuple[Request, int]] = {}
        self._version: int | None = 0
        self._arrivals = 0
        self.self_check: SelfCheck | None = None
        """What the last probe showed; see :meth:`check`."""
        self._checked: set[frozenset[bool]] = set()
        """Forms of expert weights under which a probe was generated."""
        self._later: list[Finished | Failed] = []
        """Replies that came while something else was waited for."""
        self._folder = Folder()
        with ExitStack() as undo:
            undo.callback(self._folder.remove)
            self._start(source, settings)
            undo.pop_all()

    # -- What a subclass says

    def check_model(self, model: nn.Module, spec: Spec) -> None:
        """Refuse a model that the engine cannot serve under ``spec``. Raises :class:`EngineError`."""

    def arguments(self, settings: EngineConfig) -> dict[str, Any]:
        """Plain data for the backend."""
        raise EngineError(f"{type(self).__name__} names no arguments for its backend")

    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's process, besides this one's."""
        return {}

    def _start(self, model: Any, settings: EngineConfig) -> None:
        path = self._folder.path / "model"
        with quiet():
            model.save_pretrained(path)
        told = EngineSettings(
            model=str(path),
            folder=str(self._folder.frames),
            deployed=dump_spec(self.spec),
            planned="none" if self.plan is None else str(self.plan),
        )
        arguments = self.arguments(settings) | {
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": self._device.type,
        }
        self._host = HostProcess(self._folder.path, told, self.backend, arguments, self.environment())
        with ExitStack() as undo:
            undo.callback(self._host.close)
            report = self._host.reply(START_LIMIT)
            if not isinstance(report, Report):
                raise EngineError(f"{self.name} did not start within {START_LIMIT:.0f} s; see {self._folder.path}")
            check_plan(self.plan, [line for line in report.sites if line.path == self.path])
            undo.pop_all()
        for file in path.glob("*.safetensors"):
            file.unlink()  # Read by now, and shared memory is dear.
        self.report = report
        """What the engine said when it had started: capability table, versions."""

    # -- Facts

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return Capabilities(
            name=self.name,
            kinds=frozenset(Kind(shape.site.kind) for shape in self._shapes),
            routes=bool(self.layout.moe_layers),
            truncated_sampling=True,
            stop_strings=False,
            cuda_graphs=bool(self.report.facts.get("cuda_graphs", False)),
        )

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was built."""
        return self._stats

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._waiting)

    @property
    def folder(self) -> Path:
        """Where frames wait until the store takes them; a store that takes them at once leaves it empty."""
        return self._folder.frames

    # -- Sampling

    def add(self, request: Request, *, guidance: bool = True) -> None:
        """Send a request. Without a seed, the request's id is the seed.

        Raises:
            EngineError: it can never run, or its id is in flight.
            SyncError: see :attr:`weight_version`.
        """
        version = self.weight_version
        self._check(request)
        if request.id in self._requests:
            raise EngineError(
                f"a request {request.id!r} is in flight already; ids name what comes back, so they must differ"
            )
        self._requests[request.id] = request
        sampling = request.sampling
        for sample in range(request.samples):
            key = make_key(request.id, sample, self._arrivals, f"v{version}")
            self._waiting[key] = request, sample
            self._host.channel.send(
                Sample(
                    key=key,
                    tokens=list(request.prompt_ids),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_new_tokens=sampling.max_new_tokens,
                    stop=[],
                    stop_token_ids=sorted({*self._eos, *sampling.stop_token_ids}),
                    seed=stream_key(request.id if sampling.seed is None else sampling.seed, sample) & 0x7FFFFFFF,
                    guidance=guidance and self.plan is not None,
                )
            )
        self._arrivals += 1

    def step(self) -> list[Rollout]:
        """Wait a moment for the engine; return the rollouts that finished.

        Raises:
            EngineError: the engine failed, which ends everything in flight.
        """
        _ = self.weight_version
        if not self.busy:
            return []
        self._stats.steps += 1
        finished: list[Rollout] = []
        while self._later:
            finished.append(self._finish(self._later.pop(0)))
        reply = None if finished else self._host.reply(1.0)
        while reply is not None:
            finished.append(self._finish(reply))
            reply = self._host.reply(0) if self.busy else None
        return finished

    def abort(self, request_id: str) -> list[Rollout]:
        """Give up on a request: its unfinished samples with the tokens they had, without routes and guidance.

        A sample that ends while the abort is on its way is among them, as one that was given up.

        Raises:
            EngineError: no such request is in flight.
        """
        if request_id not in self._requests:
            raise EngineError(f"no request {request_id!r} is in flight ({len(self._requests)} are)")
        keys = [key for key, (request, _) in self._waiting.items() if request.id == request_id]
        for key in keys:
            self._host.channel.send(Abort(key))
        dropped = [self._give_up(reply) for reply in self._later if reply.key in keys]
        self._later = [reply for reply in self._later if reply.key not in keys]
        while any(key in self._waiting for key in keys):
            reply = self._host.reply(START_LIMIT)
            if isinstance(reply, Finished | Failed) and reply.key in keys:
                dropped.append(self._give_up(reply))
            elif reply is not None:
                self._later.append(reply)
        return sorted(dropped, key=lambda rollout: rollout.sample)

    def _check(self, request: Request) -> None:
        check_request(request, self._limits, self._max_length, self._vocabulary)
        if request.sampling.stop:
            raise EngineError(
                f"request {request.id!r} has stop strings, but {self.name} runs without a tokenizer; give the ids of "
                "stop tokens instead"
            )

    def _finish(self, reply: Finished | Failed) -> Rollout:
        if isinstance(reply, Failed):
            raise EngineError(f"{self.name} refused sample {reply.key!r}: {reply.reason}")
        request, sample = self._pop(reply.key)
        rollout = receive(self._folder, self._store, request, sample, reply)
        count(self._stats, rollout, reply)
        return rollout

    def _give_up(self, reply: Finished | Failed) -> Rollout:
        request, sample = self._pop(reply.key)
        self._stats.aborted += 1
        if isinstance(reply, Failed):
            reply = Finished(reply.key, [], [], "abort", self.weight_version)
        return discard(self._folder, request, sample, reply)

    def _pop(self, key: str) -> tuple[Request, int]:
        request, sample = self._waiting.pop(key)
        if not any(other is request for other, _ in self._waiting.values()):
            del self._requests[request.id]
        return request, sample

    def _drop_everything(self) -> None:
        try:
            for request_id in list(self._requests):
                self.abort(request_id)
        except EngineError:
            # The engine is gone, and everything in flight with it; what went wrong is on its way up already.
            self._requests.clear()
            self._waiting.clear()
            self._later.clear()

    # -- Weights

    @torch.no_grad()
    def sync(self, state: Mapping[str, Tensor | PackedWeight], version: int) -> Digest:
        """Take new weights; see :meth:`tracefp4.rollout.engine.Engine.sync`. The engine's prefix cache is cleared."""
        if self.busy:
            raise SyncError(
                f"{len(self._requests)} requests are in flight; a rollout must come from one version of the weights"
            )
        self._version = None
        digest, nbytes = push_weights(
            self._host, self._folder, self._names, state, version, dtype=self._dtype, numerics=self.spec.weights
        )
        self._version = version
        form = frozenset(isinstance(state[name], PackedWeight) for name in self._names.experts)
        if form not in self._checked:
            self.check(state)
            self._checked.add(form)
        self._stats.syncs += 1
        self._stats.sync_bytes += nbytes
        return digest

    def check(self, state: Mapping[str, Tensor | PackedWeight]) -> SelfCheck:
        """Compare codes and log-probs of a probe prompt with the trainer's arithmetic.

        Done at the first sync of packed experts and of others, and not counted in :attr:`stats`.

        Args:
            state: the weights that are served.

        Raises:
            SyncError: they do not match; then the engine serves nothing until a sync succeeds.
        """
        counts = replace(self._stats)
        sampling = SamplingParams(max_new_tokens=4, seed=0)
        rollouts = self.generate([Request("self-check", probe_prompt(self._vocabulary), 1, sampling)])
        records: list[Record] | None = None
        handle = rollouts[0].guidance
        if handle is not None and self._store is not None:
            records = [decode(bytes(self._store.get(handle)))]
            self._store.delete(handle)
        self._stats = counts
        version, self._version = self._version, None
        self.self_check = self_check(self._names.model, state, self.spec, rollouts, records)
        self._version = version
        return self.self_check

    def digest(self) -> Digest:
        """Checksum of the weights it serves; equal to :func:`tracefp4.models.packing.model_digest` of the trainer's."""
        _ = self.weight_version
        return self._ask().digest

    def coverage(self) -> Coverage:
        """What it quantizes, by module, as its plugin reports it."""
        return engine_coverage(self._names, self.spec, self._ask().formats)

    def close(self) -> None:
        """End the engine's processes and remove its folder; again is harmless."""
        self._host.close()
        self._folder.remove()
        self._waiting.clear()
        self._requests.clear()

    def _ask(self) -> Report:
        self._host.channel.send(Ask())
        reply = self._host.reply(START_LIMIT)
        while isinstance(reply, Finished):
            self._later.append(reply)
            reply = self._host.reply(START_LIMIT)
        if not isinstance(reply, Report):
            raise EngineError(f"{self.name} did not say what it serves")
        return reply
