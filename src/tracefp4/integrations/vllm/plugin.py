"""Entry point of ``vllm.general_plugins``: vLLM calls it once in each of its processes.

Everything registered here sleeps until a model is loaded with ``quantization_config.quant_method = "tracefp4"``; the
attention backend that takes the name of the CPU's own behaves as that does for every other model, and the one with FP4
pages, ``CUSTOM``, has to be asked for.
"""

from __future__ import annotations

from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.settings import active_settings

METHOD = "tracefp4"
"""Name of the quantization method, the load format, the connector and the weight transfer backend."""
BACKEND = "tracefp4.integrations.vllm.attention.TraceAttentionBackend"
"""Rounds K and V on their way into vLLM's cache on a CPU."""
PAGES = "tracefp4.integrations.vllm.paged.PagedBackend"
"""Keeps K and V in FP4 pages, on any device."""
WORKER = "tracefp4.integrations.vllm.worker.TraceWorker"
"""Worker extension; the ``worker_extension_cls`` of the engine arguments."""


def register() -> None:
    """Register everything that the package's text lists; again is harmless."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tracefp4.integrations.vllm.loader import TraceLoader
    from tracefp4.integrations.vllm.quantization import TraceConfig

    register_quantization_config(METHOD)(TraceConfig)
    register_model_loader(METHOD)(TraceLoader)
    if not AttentionBackendEnum.CPU_ATTN.is_overridden():  # Called again, it leaves what take_pages chose.
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, PAGES)
    if METHOD not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(METHOD, "tracefp4.integrations.vllm.connector", "TraceConnector")
    if METHOD not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(METHOD, "tracefp4.integrations.vllm.transfer", "FileTransferEngine")
    _carry_rows()
    settings = active_settings()
    if settings is not None and not settings.emulate:
        _observe()


def take_pages() -> None:
    """Let vLLM on a CPU, which has one attention backend and asks for no other, take FP4 pages."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, PAGES)


def _carry_rows() -> None:
    """Offer our rows to the side channel of the second model runner, which asks only where that runs."""
    from vllm.distributed.aux_output_connector import worker

    from tracefp4.integrations.vllm.capturer import install_capturer

    install_capturer(worker)


def _observe() -> None:
    """VLLM has kernels of its own for the spec: look on."""
    from tracefp4.integrations.vllm.binding import bind
    from tracefp4.integrations.vllm.native import EXPERTS, HOOKS, LOADED
    from tracefp4.integrations.vllm.observe import Watch
    from tracefp4.integrations.vllm.session import installed

    def recorder() -> Recorder | None:
        found = installed()
        return None if found is None else found.recorder

    bind((*EXPERTS, *HOOKS, LOADED), Watch(recorder))
