"""Rows in the side channel that carries expert routes: the way out of vLLM's second model runner.

That runner has a store for what a forward pass leaves behind a token. A *capturer* with a device buffer
fills it; rows are copied to the host with the step's other results, kept by the hash of each KV block, read again on a
prefix hit, and returned with the output as ``routed_experts`` of shape ``(tokens - 1, ...)``. The store is generic:
shape and dtype of a row come from the capturer alone (``shape_per_token``, ``output_dtype``). :class:`TraceCapturer`
says ``(bytes,)`` and ``uint8``, and a row holds routes and outcomes together::

    [ recorded sites of the plan | ticket: 4 | routes | K and V of the plan, out of the pages ]

Rejected drafts, preemption, tensor parallel ranks and asynchronous copies are then handled as for routes. When a
request ends, :mod:`tracefp4.integrations.vllm.reader` turns its rows into a frame. The runner needs Triton and a GPU;
the wiring is tested with vLLM's own store and stand-ins for the rest, the runner has not run, and the capability table
says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import GuidanceCorrupt
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.vllm.attach import make_session, told_settings
from tracefp4.integrations.vllm.kv_rows import KVRows
from tracefp4.rollout.capture import Capture

_ORIGINAL = "tracefp4_original"


def row_bytes(capture: Capture) -> int:
    """Bytes of a token's row."""
    return sum(part[0].numel() * part.element_size() for part in capture.take(1))


def pack_rows(capture: Capture, count: int) -> Tensor:
    """The first ``count`` rows of a step buffer as bytes: uint8 ``(count, row_bytes)`` on its device."""
    parts = [part.reshape(count, -1).contiguous().view(torch.uint8) for part in capture.take(count)]
    return torch.cat([part.reshape(count, -1) for part in parts], dim=1)


def unpack_rows(rows: Tensor, capture: Capture) -> None:
    """Put rows of :func:`pack_rows` into the first slots of a capture made for the same plan.

    Args:
        rows: uint8 ``(T, row_bytes)``.
        capture: on the device of ``rows``, with at least ``T`` slots.

    Raises:
        GuidanceCorrupt: rows of another size.
    """
    expected = row_bytes(capture)
    if rows.ndim != 2 or rows.shape[1] != expected or rows.dtype is not torch.uint8:
        raise GuidanceCorrupt(
            f"rows of shape {tuple(rows.shape)} and {rows.dtype}; this plan has {expected} bytes each"
        )
    like, start, parts = capture.take(1), 0, []
    for part in like:
        size = part[0].numel() * part.element_size()
        data = rows[:, start : start + size].contiguous()
        parts.append(data.view(part.dtype).reshape(rows.shape[0], *part.shape[1:]))
        start += size
    capture.put(torch.arange(rows.shape[0], device=rows.device), tuple(parts))


class TraceCapturer:
    """Stands in for vLLM's ``RoutedExpertsCapturer`` in its output worker.

    Args:
        recorder: whose step buffer has ``max_num_batched_tokens`` rows.
    """

    output_dtype = torch.uint8
    output_dtype_name = "uint8"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kv = KVRows(recorder.step)
        self.shape_per_token = (row_bytes(recorder.step) + self._kv.nbytes,)

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """What vLLM's routers call: the experts ``(T, top_k)`` of a decoder layer."""
        self._recorder.route(layer_id, topk_ids)

    def snapshot_routing_data(self, num_tokens: int) -> Tensor:
        """A copy of the step's rows, taken on the main stream."""
        rows, cached = pack_rows(self._recorder.step, num_tokens), self._recorder.cached
        if not self._kv.nbytes:
            return rows
        kv = self._kv.pack(self._recorder.pool, None if cached is None else cached[:num_tokens])
        return torch.cat([rows, kv], dim=1)


def install_capturer(worker: Any) -> None:
    """Let vLLM's output worker make its store and tails for our rows, where a model of ours is served.

    Args:
        worker: the module ``vllm.distributed.aux_output_connector.worker``; again is harmless.
    """
    original = worker.RoutedExpertsCapturer
    if hasattr(original, _ORIGINAL):
        return

    def make(max_num_batched_tokens: int, vllm_config: Any) -> Any:
        told = told_settings(vllm_config)
        if told is None:
            return original(max_num_batched_tokens=max_num_batched_tokens, vllm_config=vllm_config)
        device = torch.device(vllm_config.device_config.device)
        block = vllm_config.cache_config.block_size
        session = make_session(told, vllm_config, "rows", slots=0, block_size=block, device=device)
        return TraceCapturer(session.recorder)

    setattr(make, _ORIGINAL, original)
    worker.RoutedExpertsCapturer = make
