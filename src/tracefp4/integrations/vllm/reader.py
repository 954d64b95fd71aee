"""From the rows that come back with a request's output to its frame, wherever the output is read.

vLLM returns ``CompletionOutput.routed_experts``: one row for each token but the last, made by
:class:`~tracefp4.integrations.vllm.capturer.TraceCapturer`. A :class:`FrameReader` knows what the rows are, because it
is given the same spec and plan, checks their tickets, and puts one frame into the store. It shares nothing with the
process that runs the model: weight updates are counted on both sides, and a reader that missed one finds no ticket that
fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tracefp4.errors import GuidanceCorrupt
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.recorder import Collected, Shipping
from tracefp4.integrations.vllm.capturer import row_bytes, unpack_rows
from tracefp4.integrations.vllm.kv_rows import KVRows
from tracefp4.models.layout import ModelLayout
from tracefp4.rollout.admission import recorded_shapes, stored_plan
from tracefp4.rollout.capture import Capture


class FrameReader:
    """Turns rows into frames.

    Args:
        layout: of the served model.
        spec: what is quantized.
        plan: what is recorded; ``None`` for routes alone.
        store: where frames go.

    Raises:
        EngineError: a plan without a store.
    """

    def __init__(self, layout: ModelLayout, spec: Spec, plan: Plan | None, store: Store | None) -> None:
        self._plan = stored_plan(plan, store)
        self._layout, self._spec, self._store = layout, spec, store
        self._shapes = recorded_shapes(layout, spec, self._plan)
        self._epoch = 0
        self.version = 0
        """Weight version that frames carry."""

    def new_weights(self, version: int) -> None:
        """Rows of requests that finish from now on were made with other weights; called after every update."""
        self._epoch += 1
        self.version = version

    def read(self, rows: Any, tokens: Sequence[int], key: str, *, guidance: bool = True) -> Collected:
        """The frame of a finished request.

        Args:
            rows: ``CompletionOutput.routed_experts``, a uint8 array ``(N - 1, bytes)``.
            tokens: prompt and response, ``N``.
            key: of the frame in the store.
            guidance: ship a frame, if there is a plan.

        Raises:
            GuidanceCorrupt: rows of another number or size.
        """
        count = len(tokens) - 1
        if rows is None or len(rows) != count:
            raise GuidanceCorrupt(
                f"{len(tokens)} tokens have {count} rows, vLLM returned {0 if rows is None else len(rows)}"
            )
        bits = 4 if self._plan is None else self._plan.bits
        capture = Capture(self._layout, self._shapes, bits, count, torch.device("cpu"))
        data, kv = torch.from_numpy(rows.copy()), KVRows(capture)
        if data.ndim != 2 or data.shape[1] != row_bytes(capture) + kv.nbytes:
            raise GuidanceCorrupt(
                f"rows of shape {tuple(data.shape)}; this plan has {row_bytes(capture) + kv.nbytes} bytes each"
            )
        own, carried = data.split([row_bytes(capture), kv.nbytes], dim=1)
        unpack_rows(own, capture)
        pool = kv.unpack(carried) if kv.nbytes else None
        shipping = Shipping(self._plan if guidance else None, self._spec, self._store, self._epoch, self.version)
        return shipping.collect(capture, pool, torch.arange(count), tokens, key)
