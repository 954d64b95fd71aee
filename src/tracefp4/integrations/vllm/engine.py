"""vLLM as a rollout engine: ``engine = "vllm"``.

A :class:`~tracefp4.integrations.engines.hosted.HostedEngine` that knows vLLM's arguments, and what is refused.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tracefp4.config import EngineConfig
from tracefp4.core import Request
from tracefp4.errors import EngineError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.hosted import HostedEngine
from tracefp4.integrations.vllm.arguments import ENVIRONMENT, block_size, check_layout, check_options
from tracefp4.rollout.admission import Limits
from tracefp4.rollout.engine import Capabilities

TESTED = "0.32.0"
"""Release of vLLM whose interfaces these are."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head that vLLM's CPU attention has kernels for."""


class VLLMEngine(HostedEngine):
    """See :class:`~tracefp4.integrations.engines.hosted.HostedEngine`.

    ``page_size`` grows to a multiple of 32 on a CPU, which is what vLLM's attention reads, and ``max_tokens`` to whole
    pages of that size.
    """

    name = "vllm"
    backend = "tracefp4.integrations.vllm.backend:VLLMBackend"

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return replace(super().capabilities, truncated_sampling=False)

    def check_model(self, model: nn.Module, spec: Spec) -> None:
        """Refuse models whose cache is not K and V in slots, and heads that vLLM has no kernel for."""
        if importlib.util.find_spec("vllm") is None:
            raise EngineError("engine 'vllm' needs vLLM in this environment; see docs/vllm.md")
        check_layout(self.layout)
        if self._device.type == "cpu" and self.layout.head_dim not in HEAD_SIZES:
            raise EngineError(f"heads of width {self.layout.head_dim}: vLLM's CPU attention has {HEAD_SIZES}")
        if spec.kv is not None and self.layout.v_head_dim != self.layout.head_dim:
            raise EngineError(
                f"heads of width {self.layout.head_dim} for K and {self.layout.v_head_dim} for V: an FP4 KV cache in "
                "vLLM holds one width; use a spec without kv4, or engine 'embedded'"
            )

    def arguments(self, settings: EngineConfig) -> dict[str, Any]:
        """Plain data for the host; see :class:`~tracefp4.integrations.vllm.arguments.Arguments`.

        Raises:
            EngineError: an option that is refused, or fewer tokens a step than sequences.
        """
        if settings.residual:
            raise EngineError("rollout.residual (method 'quads') is computed by the embedded engine alone; set it to 0")
        check_options(settings.options)
        size = block_size(settings.page_size, self._device.type)
        blocks = -(-settings.max_tokens // size)
        if settings.prefill_chunk < settings.max_batch:
            raise EngineError(
                "vLLM forwards prompts and decode steps in one batch: prefill_chunk = "
                f"{settings.prefill_chunk} must be at least max_batch = {settings.max_batch}"
            )
        self._limits = Limits(blocks * size, size, settings.max_batch, settings.prefill_chunk)
        return {
            "block_size": size,
            "blocks": blocks,
            "max_batch": settings.max_batch,
            "prefill_chunk": settings.prefill_chunk,
            "max_length": min(self._max_length, blocks * size),
            "options": dict(settings.options),
        }

    def environment(self) -> dict[str, str]:
        """Of the host's process, which computes with as many threads as this one."""
        level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
        return ENVIRONMENT | {"VLLM_LOGGING_LEVEL": level, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def _check(self, request: Request) -> None:
        super()._check(request)
        sampling = request.sampling
        total = len(request.prompt_ids) + sampling.max_new_tokens
        if total > self._limits.max_tokens:
            raise EngineError(
                f"request {request.id!r} may grow to {total} tokens, vLLM's KV cache has "
                f"{self._limits.max_tokens}; raise max_tokens or lower max_new_tokens"
            )
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            raise EngineError(
                f"request {request.id!r} has top_k = {sampling.top_k} and top_p = {sampling.top_p}: vLLM's "
                "log-probabilities are then those of the truncated distribution; use top_k = 0 and top_p = 1, or "
                "engine 'embedded'"
            )


def make(
    *, model: nn.Module, tokenizer: Any, spec: Spec, plan: Plan | None, store: Store | None, settings: EngineConfig
) -> VLLMEngine:
    """The entry point ``vllm`` of the group ``tracefp4.engines``."""
    return VLLMEngine(model, tokenizer, spec, plan, store, settings)
