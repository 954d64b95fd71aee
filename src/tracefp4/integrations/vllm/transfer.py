"""New weights through vLLM's own protocol: start, any number of updates, finish.

The trainer's parameters lie, under checkpoint names, in a safetensors file (``/dev/shm`` is memory). Each worker reads
it and hands the tensors to the model's own loader, so fusing and splitting stay vLLM's business. At the finish every
layer repacks what it was given. Between the two the model holds a mixture, and nothing may be generated.

On a GPU the same protocol runs with vLLM's ``nccl`` and ``ipc`` backends; this one needs neither a group nor a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from tracefp4.errors import SyncError
from tracefp4.integrations.vllm.experts import PlainMethod
from tracefp4.integrations.vllm.session import recorder


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One part of the weights."""

    path: str
    """A safetensors file of checkpoint tensors."""
    version: int = 0
    """Weight version that later frames carry."""


class FileTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights from files; see the module's text."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _version = 0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Put back the tensors that vLLM's loader writes to."""
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if isinstance(method, PlainMethod):
                method.restore(module)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one file.

        Raises:
            SyncError: the loader took none of its tensors.
        """
        from safetensors.torch import load_file

        model: Any = self.model
        loaded = model.load_weights(iter(load_file(update_info.path).items()))
        if not loaded:
            raise SyncError(f"vLLM's loader took no tensor of {update_info.path!r}; are these checkpoint names?")
        self._version = update_info.version

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Repack every layer, and separate the rows recorded from now on from those before."""
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
        recorder().new_weights(self._version)

    def shutdown(self) -> None:
        """Nothing to release."""
