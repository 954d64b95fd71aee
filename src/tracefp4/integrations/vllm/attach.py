"""The recorder of a vLLM process: what it is told, and how it is made for one of two ways out.

Rows leave the model's process in one of two ways (:data:`~.session.Carried`)::

    connector   rows by KV slot in a mirror; the KV connector gathers them before a request's blocks are freed
    rows        the side channel that vLLM's second model runner has for expert routes carries them, block by block

The first needs scheduler and worker in one process and is what runs on a CPU. The second is made for production:
asynchronous copies, tensor parallel ranks, frontends elsewhere. It is chosen where the second model runner runs on a
GPU, and is announced in the capability table.

K and V are read from one of three places: codes kept beside vLLM's cache of rounded values (on a CPU), our FP4 pages
inside vLLM's cache (:mod:`~.paged`), or vLLM's own NVFP4 pages (:mod:`~.own_pages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.settings import EngineSettings, active_settings
from tracefp4.integrations.engines.weights import Names, skeleton
from tracefp4.integrations.vllm.arguments import check_layout
from tracefp4.integrations.vllm.own_pages import read_own_pages
from tracefp4.integrations.vllm.pages import CachePages, attention_layers, has_pages, read_pages
from tracefp4.integrations.vllm.session import Carried, Session, install
from tracefp4.rollout.pool import StoredKV

SAID: dict[Carried, str] = {"connector": "rows by KV slot", "rows": "rows in vLLM's routed-experts channel"}
"""The same in words, for the capability table."""


def told_settings(vllm_config: Any) -> EngineSettings | None:
    """What a vLLM process is told: by our quantization method, or by the settings file if it is only watched.

    Returns:
        ``None`` for a model that is none of ours.
    """
    from tracefp4.integrations.vllm.quantization import TraceConfig

    if isinstance(vllm_config.quant_config, TraceConfig):
        return vllm_config.quant_config.settings
    settings = active_settings()
    return None if settings is None or settings.emulate else settings


def choose_carried(vllm_config: Any, device: str) -> Carried:
    """The side channel where vLLM has it, the connector elsewhere."""
    return "rows" if device != "cpu" and vllm_config.use_v2_model_runner else "connector"


def find_cache(told: EngineSettings, layers: Mapping[int, Any]) -> StoredKV | None:
    """The pages of vLLM's cache that hold K and V in FP4; ``None`` if codes are kept beside it, or not at all.

    Args:
        told: settings.
        layers: vLLM's attention layers.
    """
    if told.spec.kv is None:
        return None
    if not told.emulate:
        return CachePages(layers, read_own_pages)
    if any(map(has_pages, layers.values())):
        return CachePages(layers, read_pages)
    return None


def make_session(
    told: EngineSettings, vllm_config: Any, carried: Carried, *, slots: int, block_size: int, device: torch.device
) -> Session:
    """Build recorder and store of this process, and install them.

    Args:
        told: settings.
        vllm_config: vLLM's own.
        carried: how rows leave.
        slots: KV slots; 0 if rows leave by the side channel, which needs no mirror.
        block_size: tokens a block.
        device: of the model.

    Raises:
        EngineError: a model that cannot be recorded.
    """
    names = Names(skeleton(told.model))
    check_layout(names.layout)
    # With the side channel frames are made where outputs are read, and a folder has one writer.
    store: Store = FileStore(told.folder) if carried == "connector" else MemoryStore()
    pool = find_cache(told, attention_layers(vllm_config))
    recorder = Recorder(
        names.layout,
        told.spec,
        told.plan,
        store,
        slots=slots,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        dtype=vllm_config.model_config.dtype,
        device=device,
        pool=pool,
    )
    session = Session(recorder, store, block_size, names, carried)
    install(session)
    return session
