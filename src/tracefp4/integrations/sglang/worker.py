"""What the process that runs the model has of ours: settings, recorder, and the experts that were bound.

There is one model in such a process, so there is one :class:`Worker`, made when it is first asked for. The recorder
needs the number of KV slots, which SGLang knows after the model is loaded; experts are bound while it is loaded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import Site
from tracefp4.errors import EngineError
from tracefp4.guidance.file_store import FileStore
from tracefp4.integrations.engines.experts import EmulatedExperts
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.settings import EngineSettings, active_settings
from tracefp4.integrations.engines.weights import Names, skeleton
from tracefp4.models.packing import PackedWeight
from tracefp4.models.sites import Operand
from tracefp4.rollout.pool import StoredKV

KEY = "tracefp4"
"""Name of the quantization method, of the request option, and of the reply's field."""


class Worker:
    """Our side of one SGLang model process.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.spec, self.plan = settings, settings.spec, settings.plan
        self.names = Names(skeleton(settings.model))
        self.experts: dict[int, EmulatedExperts] = {}
        self.routers: set[int] = set()
        """Layers whose routes were met."""
        self.quantization: str | None = None
        """SGLang's own method, where its kernels compute."""
        self.kv_pool: Any = None
        """SGLang's own pool."""
        self.store = FileStore(settings.folder)
        self._recorder: Recorder | None = None

    @property
    def recorder(self) -> Recorder:
        """The recorder.

        Raises:
            EngineError: SGLang has not set up its capturer yet.
        """
        if self._recorder is None:
            raise EngineError("the model ran before its KV pool was set up")
        return self._recorder

    @property
    def recording(self) -> bool:
        """Whether the recorder is there."""
        return self._recorder is not None

    def set_up(
        self, slots: int, step_tokens: int, dtype: torch.dtype, device: torch.device, pool: StoredKV | None = None
    ) -> Recorder:
        """Make the recorder; ``pool`` is SGLang's own FP4 pool where it has one."""
        self._recorder = Recorder(
            self.names.layout,
            self.spec,
            self.plan,
            self.store,
            slots=slots,
            step_tokens=step_tokens,
            dtype=dtype,
            device=device,
            pool=pool,
        )
        return self._recorder

    def packed(self) -> dict[tuple[int, str], PackedWeight]:
        """Expert weights that were packed here, by layer and projection."""
        return {(layer, name): weight for layer, e in self.experts.items() for name, weight in e.packed.items()}

    def quantize(self, site: Site, x: Tensor, pairs: Tensor | None) -> Operand:
        """See :meth:`Recorder.quantize`."""
        return self.recorder.quantize(site, x, pairs)


@functools.cache
def worker() -> Worker:
    """The worker of this process.

    Raises:
        EngineError: the process was not told to record anything.
    """
    settings = active_settings()
    if settings is None:
        raise EngineError("this process has no engine settings; the plugin is not active")
    return Worker(settings)


def layer_of(module: Any) -> int:
    """Decoder layer of one of SGLang's modules."""
    return int(module.layer_id)
