"""SGLang as a rollout engine: ``engine = "sglang"``.

A :class:`~tracefp4.integrations.engines.hosted.HostedEngine` that knows SGLang's arguments, and what is refused: where
our arithmetic is emulated, experts must lie whole on one device, because a global scale is made of a whole weight; and
speculative decoding would record rows of tokens that were never kept.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from tracefp4.config import EngineConfig
from tracefp4.errors import EngineError
from tracefp4.formats.spec import Spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.hosted import HostedEngine
from tracefp4.integrations.engines.options import refuse_options

TESTED = "0.5.23"
"""Release of SGLang whose hooks these are."""

ONE: dict[str, str] = {
    "tp_size": "tensor parallelism",
    "pp_size": "pipeline parallelism",
    "dp_size": "data parallelism inside the engine",
    "ep_size": "expert parallelism",
}
"""Arguments that must be 1, and what they are."""

REFUSED: dict[str, str] = {
    "speculative_algorithm": "speculative decoding records rows of tokens that are rejected afterwards",
    "enable_hierarchical_cache": "a cache tier outside the KV pool has no rows of guidance",
    "enable_unified_memory": "slots of a unified pool move",
    "lora_paths": "LoRA experts take another path",
    "quantization": "the spec says what is quantized",
    "kv_cache_dtype": "the spec says what is quantized",
    "model_path": "the policy says which model is served",
    "enable_return_routed_experts": "routes come with every rollout already",
}
"""Arguments that cannot be given, and why."""


class SGLangEngine(HostedEngine):
    """See :class:`~tracefp4.integrations.engines.hosted.HostedEngine`."""

    name = "sglang"
    backend = "tracefp4.integrations.sglang.backend:SGLangBackend"

    def check_model(self, model: nn.Module, spec: Spec) -> None:
        """Refuse latent attention and layers with a recurrent state."""
        if self.layout.latent_rank is not None and spec.kv is not None:
            raise EngineError(
                "an FP4 cache of latent attention is not emulated in SGLang; use a spec without kv4, or the embedded "
                "engine"
            )
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("engine 'sglang' needs SGLang in this environment; see docs/sglang.md")

    def arguments(self, settings: EngineConfig) -> dict[str, Any]:
        """Arguments of ``sglang.Engine``.

        Raises:
            EngineError: an option that is refused.
        """
        if settings.residual:
            raise EngineError("rollout.residual (method 'quads') is computed by the embedded engine alone; set it to 0")
        options = dict(settings.options)
        check_options(options)
        server: dict[str, Any] = {
            "max_total_tokens": settings.max_tokens,
            "page_size": settings.page_size,
            "max_running_requests": settings.max_batch,
            "chunked_prefill_size": settings.prefill_chunk,
            "disable_cuda_graph": not settings.cuda_graphs,
            "log_level": "warning",
            "random_seed": 0,
            "grammar_backend": "none",
        }
        if self._device.type == "cpu":
            server |= {
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "disable_cuda_graph": True,
                "mem_fraction_static": 0.5,
                # Else an idle scheduler spins, on a core that the trainer needs.
                "sleep_on_idle": True,
            }
        else:
            server |= {"moe_runner_backend": "triton"}
        return {"server": server | options}

    def environment(self) -> dict[str, str]:
        """The engine computes with as many threads as this process."""
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def check_options(options: dict[str, Any]) -> None:
    """Refuse options under which guidance would be wrong.

    Raises:
        EngineError: naming the option.
    """
    refuse_options(options, "SGLang", one=ONE, refused=REFUSED)


def make(
    *, model: nn.Module, tokenizer: Any, spec: Spec, plan: Plan | None, store: Store | None, settings: EngineConfig
) -> SGLangEngine:
    """The entry point ``sglang`` of the group ``tracefp4.engines``."""
    return SGLangEngine(model, tokenizer, spec, plan, store, settings)
