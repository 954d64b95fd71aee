"""vLLM behind the host's interface; see :class:`tracefp4.integrations.engines.host.Backend`.

One sample is one request of vLLM's with a seed of its own. ``poll`` makes engine steps; what ends in one has been
gathered by the connector already (:mod:`tracefp4.integrations.vllm.connector`), and only its handle is passed on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracefp4.errors import SyncError
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.coverage import reported_formats
from tracefp4.integrations.engines.handover import put_routes
from tracefp4.integrations.engines.recorder import Collected
from tracefp4.integrations.engines.settings import EngineSettings
from tracefp4.integrations.engines.sites import render_sites
from tracefp4.integrations.engines.weights import Names, skeleton
from tracefp4.integrations.engines.wire import Failed, Finished, Parcel, Report, Sample
from tracefp4.integrations.vllm.arguments import (
    ENVIRONMENT,
    check_options,
    engine_arguments,
    packs_pages,
    read_arguments,
)
from tracefp4.integrations.vllm.attach import choose_carried
from tracefp4.integrations.vllm.reader import FrameReader
from tracefp4.integrations.vllm.session import recorder, session
from tracefp4.models.weight_file import read_weights


@dataclass(slots=True)
class _Running:
    sample: Sample
    internal: str
    """vLLM's own id of the request."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0


class VLLMBackend:
    """Hosts one ``LLMEngine``.

    Args:
        settings: of the plugin.
        arguments: see :class:`~tracefp4.integrations.vllm.arguments.Arguments`.

    Raises:
        EngineError: a feature that guidance cannot follow.
    """

    def __init__(self, settings: EngineSettings, arguments: dict[str, Any]) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        self.settings, self.told = settings, read_arguments(arguments)
        check_options(self.told.options)
        folder = Path(settings.model)
        self._names = Names(skeleton(folder))
        self._running: dict[str, _Running] = {}
        self._ended: list[Finished | Failed] = []
        from vllm.v1.engine.llm_engine import LLMEngine

        from tracefp4.integrations.vllm.plugin import register, take_pages

        register()
        spec = settings.spec
        pages = spec.kv if packs_pages(spec, self.told.device, self.told.options) else None
        if pages is not None and self.told.device == "cpu":
            take_pages()
        config = engine_arguments(folder, self.told, self._names.layout, pages=pages).create_engine_config()
        rows = choose_carried(config, self.told.device) == "rows"
        if rows:
            config = engine_arguments(
                folder, self.told, self._names.layout, rows=True, pages=pages
            ).create_engine_config()
        self._llm: Any = LLMEngine.from_vllm_config(config, disable_log_stats=not rows)
        self._facts = self._rpc("tracefp4_attach")
        self._reader: FrameReader | None = None
        """Of the side channel; without, the connector gathers."""
        self._store: Store = FileStore(settings.folder) if rows else session().store
        if rows:
            self._reader = FrameReader(self._names.layout, settings.spec, settings.plan, self._store)
        logging.getLogger("vllm.tracefp4").info("sites:\n%s", render_sites(session().sites))

    def _rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return self._llm.collective_rpc(method, args=args)[0]

    # -- Sampling

    def submit(self, sample: Sample) -> None:
        """Start a sample."""
        params = _sampling_params(sample)
        internal = self._llm.add_request(sample.key, {"prompt_token_ids": list(sample.tokens)}, params)
        self._running[sample.key] = _Running(sample, internal)

    def abort(self, key: str) -> None:
        """Give up on a sample; :meth:`poll` returns it with what it had."""
        running = self._running.pop(key, None)
        if running is not None:
            self._llm.abort_request([running.internal], internal=True)
            session().collected.pop(key, None)
            self._ended.append(self._finished(running, "abort", None))

    def poll(self, timeout: float) -> Sequence[Finished | Failed]:
        """Make steps until something ends or time is up."""
        deadline = time.monotonic() + timeout
        while not self._ended and self._running and time.monotonic() < deadline:
            for output in self._llm.step():
                self._take(output)
        ended, self._ended = self._ended, []
        return ended

    def _take(self, output: Any) -> None:
        running = self._running.get(output.request_id)
        if running is None:
            return
        completion = output.outputs[0]
        for token, entry in zip(completion.token_ids, completion.logprobs or (), strict=True):
            running.tokens.append(int(token))
            running.logprobs.append(float(entry[token].logprob))
        running.cached = output.num_cached_tokens or 0
        if not output.finished:
            return
        key = running.sample.key
        del self._running[key]
        found = self._collected(running, output)
        if any(value != value for value in running.logprobs):
            self._ended.append(Failed(f"the logits are NaN under weights of version {recorder().version}", key))
        elif completion.finish_reason not in ("stop", "length") or found is None:
            self._ended.append(Failed(f"it ended in vLLM with {completion.finish_reason!r}, its rows were lost", key))
        else:
            self._ended.append(self._finished(running, completion.finish_reason, found))

    def _collected(self, running: _Running, output: Any) -> tuple[Collected, int] | None:
        """Rows of a finished request, and how often it had been preempted; ``None`` if they were lost."""
        sample, rows = running.sample, output.outputs[0].routed_experts
        if self._reader is None:
            return session().collected.pop(sample.key, None)
        if rows is None:
            return None
        found = self._reader.read(rows, [*sample.tokens, *running.tokens], sample.key, guidance=sample.guidance)
        return found, int(getattr(output.metrics, "num_preemptions", 0))

    def _finished(self, running: _Running, reason: Any, found: tuple[Collected, int] | None) -> Finished:
        routes = guidance = None
        invalid = preemptions = 0
        if found is not None:
            rows, preemptions = found
            invalid = rows.invalid_rows
            if rows.guidance is not None:
                guidance = Parcel(rows.guidance.key, rows.guidance.nbytes)
            if rows.routes is not None:
                handle, shape, dtype = put_routes(self._store, f"{running.sample.key}.routes", rows.routes)
                routes = Parcel(handle.key, handle.nbytes, list(shape), dtype)
        return Finished(
            key=running.sample.key,
            tokens=running.tokens,
            logprobs=running.logprobs,
            finish=reason,
            version=recorder().version,
            routes=routes,
            guidance=guidance,
            cached_tokens=running.cached,
            retractions=preemptions,
            invalid_rows=invalid,
        )

    # -- Weights and facts

    def load(self, path: str, version: int) -> str:
        """Take new weights through vLLM's weight transfer; the prefix cache is emptied.

        Raises:
            SyncError: they are not in place.
            FormatError: the file is not whole.
        """
        # Before vLLM is told that weights change: what is refused here leaves it as it was.
        self._names.check(read_weights(Path(path)), self.settings.spec.weights)
        self._rpc("start_weight_update")
        self._rpc("update_weights", {"path": path, "version": version})
        self._rpc("finish_weight_update")
        if not self._llm.reset_prefix_cache():
            raise SyncError("vLLM did not empty its prefix cache, so old K and V could be used with new weights")
        self._llm.set_weight_version(str(version))
        if self._reader is not None:
            self._reader.new_weights(version)
        return self._rpc("tracefp4_digest")

    def report(self) -> Report:
        """Say what is served."""
        found = session()
        return Report(
            digest=self._rpc("tracefp4_digest"),
            version=found.recorder.version,
            formats=reported_formats(found.recorder, found.packed(), found.layers()),
            sites=found.sites,
            facts=self._facts,
        )

    def close(self) -> None:
        """Shut vLLM down."""
        llm, self._llm = getattr(self, "_llm", None), None
        if llm is not None:
            llm.collective_rpc("tracefp4_detach")
            llm.engine_core.shutdown()
            self._store.close()


def _sampling_params(sample: Sample) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from tracefp4.integrations.vllm.plugin import METHOD

    return SamplingParams(
        temperature=sample.temperature,
        max_tokens=sample.max_new_tokens,
        stop_token_ids=list(sample.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        seed=sample.seed,
        output_kind=RequestOutputKind.DELTA,
        extra_args={METHOD: {"key": sample.key, "guidance": sample.guidance}},
    )
