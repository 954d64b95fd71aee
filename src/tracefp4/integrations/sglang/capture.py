"""Rows by KV slot, carried by the machinery that SGLang has for routed experts.

SGLang returns the experts of each token (for routing replay) with a *capturer*: a device buffer that forwards write, a
host buffer by KV slot, an asynchronous copy between the two with the batch's other results, and a gather when a request
ends. We take the capturer's place. Its methods are SGLang's interface; behind them is a
:class:`~tracefp4.integrations.engines.recorder.Recorder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tracefp4.guidance.codec import CHUNK
from tracefp4.integrations.engines.handover import put_routes
from tracefp4.integrations.engines.recorder import Recorder, Step
from tracefp4.integrations.engines.sites import check_plan, render_sites
from tracefp4.integrations.sglang.native import site_table
from tracefp4.integrations.sglang.observe import NativePool
from tracefp4.integrations.sglang.worker import KEY, worker

logger = logging.getLogger(__name__)


class SlotCapturer:
    """In place of SGLang's ``RoutedExpertsCapturer``.

    Args:
        recorder: what is behind it.
    """

    num_fused_shared_experts = 0

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """A router has chosen experts ``(T, top_k)``."""
        worker().routers.add(layer_id)
        self.recorder.route(layer_id, topk_indices[:, : self.recorder.layout.top_k])

    def on_forward_end(
        self,
        forward_batch: Any,
        can_run_graph: bool = False,
        cuda_graph_batch: int | None = None,
        no_copy_to_cpu: bool = False,
    ) -> StepOutput | None:
        """A forward pass is over: its rows, to be copied with the batch's results, or kept at once."""
        step = self.recorder.end()
        if step is not None and no_copy_to_cpu:
            return StepOutput(step, self.recorder)
        self.recorder.keep(step)
        return None

    def destroy(self) -> None:
        """Nothing is pinned."""


class StepOutput:
    """In place of SGLang's ``TopkCaptureOutput``: device tensors that it copies when it copies the results."""

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self._step, self._recorder = step, recorder

    def map_device_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by what SGLang's copy makes of it."""
        self._step.slots = fn(self._step.slots)
        self._step.rows = tuple(fn(part) for part in self._step.rows)

    def finalize(self) -> None:
        """The copies are complete."""
        self._recorder.keep(self._step)


def make_capturer(*, model: Any, model_config: Any, num_tokens: int, max_running_requests: int, device: str) -> Any:
    """Instead of ``RoutedExpertsCapturer.create``; shows the capability table.

    Raises:
        EngineError: the plan has a site that this backend does not show.
    """
    from sglang.srt.runtime_context import get_schedule

    ours = worker()
    ours.quantization = model_config.quantization
    table = site_table(ours)
    logger.info("tracefp4 sites:\n%s", render_sites(table))
    check_plan(ours.plan, table, observed=not ours.settings.emulate)
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or 0
    prefill = chunk if chunk > 0 else schedule.max_prefill_tokens
    # A page of padding slots lies behind the pool; a mixed batch holds a chunk and every running request.
    slots = -(-(num_tokens + 1) // CHUNK) * CHUNK + 256
    tokens = max(prefill, 64) + max_running_requests
    native = None if ours.settings.emulate or ours.spec.kv is None else NativePool(lambda: ours.kv_pool)
    recorder = ours.set_up(slots, tokens, model_config.dtype, torch.device(device), native)
    logger.info("tracefp4 keeps %d bytes for %d slots", recorder.nbytes, slots)
    return SlotCapturer(recorder)


def begin_forward(*args: Any, **kwargs: Any) -> None:
    """Before ``ModelRunner.forward(self, forward_batch, ...)``."""
    runner = args[0]
    batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[1]
    if runner.is_draft_worker or not worker().recording or batch.out_cache_loc is None:
        return
    worker().kv_pool = runner.token_to_kv_pool
    slots = batch.out_cache_loc_virtual if batch.out_cache_loc_virtual is not None else batch.out_cache_loc
    count = slots.numel()
    worker().recorder.begin(slots, batch.positions[:count], batch.input_ids[:count])


def collect_finished(result: Any, *args: Any, **kwargs: Any) -> None:
    """After ``SchedulerBatchResultProcessor._maybe_collect_routed_experts(self, req)``; the slots are still its own."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    processor, req = args[0], args[1]
    asked = option_of(req)
    if asked is None or isinstance(req.finished_reason, FINISH_ABORT):
        return
    ours = worker()
    tokens = [*req.origin_input_ids, *req.output_ids_through_stop]
    slots = processor.req_to_token_pool.req_to_token[req.kv.req_pool_idx][: len(tokens) - 1]
    found = ours.recorder.collect(slots, tokens, asked["key"], guidance=bool(asked.get("guidance")))
    reply: dict[str, Any] = {
        "version": ours.recorder.version,
        "rows": found.rows,
        "invalid_rows": found.invalid_rows,
        "retractions": req.retraction_count,
        "guidance": None if found.guidance is None else [found.guidance.key, found.guidance.nbytes],
        "routes": None,
    }
    if found.routes is not None:
        handle, shape, dtype = put_routes(ours.store, f"{asked['key']}.routes", found.routes)
        reply["routes"] = [handle.key, handle.nbytes, list(shape), dtype]
    req.customized_info = {**(req.customized_info or {}), KEY: [reply]}


def option_of(req: Any) -> dict[str, Any] | None:
    """What a request asks of us, ``None`` for nothing."""
    asked = (req.sampling_params.custom_params or {}).get(KEY)
    return asked if isinstance(asked, dict) and "key" in asked else None


def whole_field(result: bool, *args: Any, **kwargs: Any) -> bool:
    """After ``is_request_level_customized_info_key(self, key)``: our field is one of the request, not of a token."""
    return result or args[1] == KEY
