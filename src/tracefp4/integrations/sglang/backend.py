"""SGLang's offline engine, in the process that hosts it.

Its tokenizer manager lives in an event loop; samples are tasks of that loop, and :meth:`SGLangBackend.poll` runs it for
a moment. The scheduler, which runs the model, is another process still, reached by name through ``collective_rpc``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracefp4.core import FinishReason
from tracefp4.errors import EngineError
from tracefp4.integrations.engines.settings import EngineSettings
from tracefp4.integrations.engines.wire import Failed, Finished, Parcel, Report, Sample, SiteLine
from tracefp4.integrations.sglang.refit import LOADER, announcement
from tracefp4.integrations.sglang.worker import KEY
from tracefp4.models.weight_file import read_weights

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangBackend:
    """See :class:`tracefp4.integrations.engines.host.Backend`.

    Args:
        settings: of the engine.
        arguments: ``server``: arguments of ``sglang.Engine``; ``device`` and ``dtype`` of the model.
    """

    def __init__(self, settings: EngineSettings, arguments: dict[str, Any]) -> None:
        import sglang

        self._folder = Path(tempfile.mkdtemp(prefix="report-", dir=Path(settings.folder).parent))
        self._engine = sglang.Engine(
            model_path=settings.model,
            quantization=KEY,
            dtype=arguments["dtype"],
            device=arguments["device"],
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
            **arguments["server"],
        )
        self._tasks: dict[str, asyncio.Task[Finished | Failed]] = {}
        self._version = sglang.__version__
        self._arguments = arguments["server"]

    def submit(self, sample: Sample) -> None:
        """Start a sample."""
        self._tasks[sample.key] = self._engine.loop.create_task(self._generate(sample))

    def abort(self, key: str) -> None:
        """Give up on a sample."""
        if key in self._tasks:
            self._engine.loop.run_until_complete(self._abort(key))

    def poll(self, timeout: float) -> Sequence[Finished | Failed]:
        """Run the loop until something ends, or for ``timeout`` seconds."""
        if not self._tasks:
            return []
        wait = asyncio.wait(self._tasks.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._engine.loop.run_until_complete(wait)
        ended = [key for key, task in self._tasks.items() if task.done()]
        return [self._tasks.pop(key).result() for key in ended]

    def load(self, path: str, version: int) -> str:
        """Take weights, and return the checksum of what is served then.

        Raises:
            FormatError: the file is not whole.
            EngineError: SGLang refused, or serves something else.
        """
        # What fails in SGLang's scheduler ends it, so a damaged file is met here.
        read_weights(Path(path))
        engine = self._engine
        for what, (done, message) in (
            ("begin", _answer(engine.begin_weight_update())),
            (
                "update",
                _answer(engine.update_weights_from_tensor(announcement(path, version), LOADER, flush_cache=True)),
            ),
            ("end", _answer(engine.end_weight_update())),
        ):
            if not done:
                raise EngineError(f"SGLang refused to {what} a weight update: {message}")
        found = self._ask()
        if found["fault"]:
            raise EngineError(found["fault"])
        if found["version"] != version:
            raise EngineError(f"SGLang serves weights of version {found['version']}, {version} were sent")
        return found["digest"]

    def report(self) -> Report:
        """Ask the scheduler what it serves."""
        found = self._ask()
        facts = {
            "engine": f"sglang {self._version}",
            "cuda_graphs": not self._arguments.get("disable_cuda_graph", False),
            "record_bytes": found["bytes"],
            "fault": found["fault"],
        }
        formats = [tuple(line) for line in found["formats"]]
        sites = [SiteLine(*line) for line in found["sites"]]
        return Report(found["digest"], found["version"], formats, sites, facts)

    def close(self) -> None:
        """End the scheduler and its kin. SGLang's own shutdown would end every child of this process."""
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        for pid in self._engine.get_all_child_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _ask(self) -> dict[str, Any]:
        path = self._folder / "report.json"
        try:
            self._engine.collective_rpc(f"{KEY}_report", path=str(path))
        except AssertionError as error:
            raise EngineError(f"SGLang's scheduler did not say what it serves: {error}") from error
        found = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return found

    async def _abort(self, key: str) -> None:
        # A task that has not run yet has not reached the scheduler; then there is nothing to abort there.
        await asyncio.sleep(0)
        while key in self._tasks and not self._tasks[key].done():
            self._engine.tokenizer_manager.abort_request(key)
            await asyncio.wait([self._tasks[key]], timeout=0.02)

    async def _generate(self, sample: Sample) -> Finished | Failed:
        params: dict[str, Any] = {
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "top_k": sample.top_k or -1,
            "max_new_tokens": sample.max_new_tokens,
            "stop_token_ids": sample.stop_token_ids or None,
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": sample.seed,
            "custom_params": {KEY: {"key": sample.key, "guidance": sample.guidance}},
        }
        try:
            found = await self._engine.async_generate(
                input_ids=sample.tokens, sampling_params=params, return_logprob=True, rid=sample.key
            )
        except (ValueError, RuntimeError) as error:
            return Failed(str(error), sample.key)
        return finished(sample.key, found)


def finished(key: str, found: dict[str, Any]) -> Finished:
    """A reply of SGLang as ours."""
    meta = found["meta_info"]
    ours = meta.get(KEY) or [{}]
    ours = ours[0] if isinstance(ours, list) else ours
    kind = (meta.get("finish_reason") or {"type": "abort"})["type"]
    if kind not in _FINISH:
        raise EngineError(f"SGLang ended sample {key!r} for a reason that is not known: {kind!r}")
    guidance, routes = ours.get("guidance"), ours.get("routes")
    tokens = list(found["output_ids"])
    logprobs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or []]
    return Finished(
        key=key,
        tokens=tokens[: len(logprobs)],
        logprobs=logprobs[: len(tokens)],
        finish=_FINISH[kind],
        version=int(ours.get("version", 0)),
        routes=None if routes is None else Parcel(*routes),
        guidance=None if guidance is None else Parcel(*guidance),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        retractions=int(ours.get("retractions", meta.get("num_retractions") or 0)),
        invalid_rows=int(ours.get("invalid_rows", 0)),
    )


def _answer(reply: Any) -> tuple[bool, str]:
    """``(success, message)`` of SGLang's several kinds of reply."""
    if isinstance(reply, tuple):
        return bool(reply[0]), str(reply[1])
    return bool(reply.success), str(reply.message)
