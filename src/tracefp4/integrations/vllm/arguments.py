"""Engine arguments of vLLM that follow from ours, and what vLLM may not be asked for.

vLLM counts its KV cache in blocks; the CPU's attention wants them in multiples of 32 tokens, and block 0 is never given
to a request. Scheduler and worker run in one process, because a finished request's rows are gathered where its blocks
are freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tracefp4.errors import ConfigError, EngineError
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec
from tracefp4.integrations.engines.options import refuse_options
from tracefp4.integrations.vllm.pages import row_bytes
from tracefp4.integrations.vllm.plugin import METHOD, WORKER
from tracefp4.models.layout import ModelLayout

PAGED = "CUSTOM"
"""Name under which vLLM knows our attention backend with FP4 pages."""

BLOCK_UNIT = {"cpu": 32, "cuda": 16}
"""Tokens that a block is a multiple of."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Of the process that hosts vLLM. Nothing is compiled: forwards are eager, and compiling the few functions around them
takes longer than they do."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the host is told besides the plugin's settings."""

    dtype: str
    device: str
    block_size: int
    blocks: int
    """Blocks that requests can have."""
    max_batch: int
    prefill_chunk: int
    max_length: int
    """Tokens of the longest request."""
    options: dict[str, Any] = {}
    """Engine arguments under vLLM's own names, which override ours."""


def read_arguments(data: dict[str, Any]) -> Arguments:
    """Check plain data. Raises :class:`~tracefp4.errors.ConfigError`."""
    try:
        return msgspec.convert(data, Arguments)
    except msgspec.ValidationError as error:
        raise ConfigError(f"arguments of the vLLM host: {error}") from error


def block_size(page_size: int, device: str) -> int:
    """Our page, grown to a block that vLLM's attention on ``device`` can read."""
    unit = BLOCK_UNIT.get(device, 16)
    return -(-page_size // unit) * unit


def packs_pages(spec: Spec, device: str, options: Mapping[str, Any]) -> bool:
    """Whether K and V lie in FP4 pages: on a GPU if the spec quantizes them, on a CPU if :data:`PAGED` is asked for.

    Raises:
        EngineError: another attention backend for a quantized cache on a GPU, or FP4 pages without one.
    """
    asked = str(getattr(options.get("attention_backend"), "name", options.get("attention_backend", ""))).upper()
    if spec.kv is None:
        if asked == PAGED:
            raise EngineError(f"attention backend {PAGED} is an FP4 KV cache, and spec {spec.name!r} has none")
        return False
    if device != "cpu" and asked not in ("", PAGED):
        raise EngineError(
            f"rollout.options.attention_backend = {asked!r} does not know FP4 pages, which spec {spec.name!r} has on a "
            f"GPU; leave it out, or use {PAGED!r}"
        )
    return device != "cpu" or asked == PAGED


def engine_arguments(
    folder: Path, told: Arguments, layout: ModelLayout, *, rows: bool = False, pages: Numerics | None = None
) -> Any:
    """``EngineArgs`` for the model in ``folder``.

    Args:
        folder: of the model.
        told: sizes and options.
        layout: of the model.
        rows: whether recorded rows leave by vLLM's side channel for routes, and not by the KV connector.
        pages: numerics of FP4 pages; ``None``: K and V lie in the model's dtype.
    """
    from vllm.config import KVTransferConfig, WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    token = 2 * layout.kv_heads * layout.head_dim * {"float32": 4}.get(told.dtype, 2)
    if pages is not None:
        token = row_bytes(layout.kv_heads, layout.head_dim, pages.block)
    per_block = len(layout.kv_layers) * token * told.block_size
    values: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": told.dtype,
        "enforce_eager": True,
        "max_model_len": told.max_length,
        "block_size": told.block_size,
        "num_gpu_blocks_override": told.blocks + 1,
        "kv_cache_memory_bytes": (told.blocks + 1) * per_block,
        "max_num_seqs": told.max_batch,
        "max_num_batched_tokens": told.prefill_chunk,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "logprobs_mode": "processed_logprobs",
        "quantization": METHOD,
        "load_format": METHOD,
        "hf_overrides": {"quantization_config": {"quant_method": METHOD}},
        "weight_transfer_config": WeightTransferConfig(backend=METHOD),
        "worker_extension_cls": WORKER,
        # The channel's frames learn of preemptions from vLLM's statistics.
        "disable_log_stats": not rows,
        "seed": 0,
        "async_scheduling": False,
    }
    if pages is not None:
        values["attention_backend"] = PAGED
    if rows:
        values["enable_return_routed_experts"] = True
    else:
        values["kv_transfer_config"] = KVTransferConfig(kv_connector=METHOD, kv_role="kv_both")
    return EngineArgs(**{**values, **told.options})


REFUSED: dict[str, str] = {
    "speculative_config": "speculative decoding records rows of tokens that are rejected afterwards",
    "async_scheduling": "it runs a step ahead of the tokens that are returned",
    "enable_lora": "LoRA adapters change weights that the checksum covers",
    "kv_transfer_config": "the plugin needs the connector to gather rows before blocks are freed",
    "weight_transfer_config": "weights come through the plugin's own transfer",
    "worker_extension_cls": "the plugin extends the worker itself",
    "load_format": "the plugin keeps weights that other loaders drop",
    "quantization": "the spec says what is quantized",
    "kv_cache_dtype": "the spec says what is quantized",
    "model": "the policy says which model is served",
    "logprobs_mode": "log-probabilities are those after temperature",
    "aux_output_config": "routes come with every rollout already",
    "enable_return_routed_experts": "routes come with every rollout already",
}
"""Engine arguments that cannot be given, and why."""

ONE: dict[str, str] = {
    "tensor_parallel_size": "tensor parallelism",
    "pipeline_parallel_size": "pipeline parallelism",
    "data_parallel_size": "data parallelism inside the engine",
    "decode_context_parallel_size": "context parallelism",
}
"""Engine arguments that must be 1, and what they are."""


def check_options(options: dict[str, Any]) -> None:
    """Refuse engine arguments under which guidance would be wrong.

    Raises:
        EngineError: naming the argument.
    """
    refuse_options(options, "vLLM", one=ONE, refused=REFUSED)
    if not options.get("enforce_eager", True):
        raise EngineError(
            "rollout.options.enforce_eager = False is refused: rows are recorded by hooks on the model, which a "
            "compiled or captured forward leaves out; leave it out"
        )


def check_layout(layout: ModelLayout) -> None:
    """Refuse models whose cache is not K and V in slots.

    Raises:
        EngineError: saying what they have instead.
    """
    if layout.latent_rank is not None:
        raise EngineError(f"{layout.family}: latent attention is not recorded inside vLLM; use engine 'embedded'")
    if layout.linear_layers:
        raise EngineError(
            f"{layout.family}: layers {list(layout.linear_layers[:3])} have linear attention, whose state vLLM keeps "
            "in other blocks than K and V; use engine 'embedded'"
        )
