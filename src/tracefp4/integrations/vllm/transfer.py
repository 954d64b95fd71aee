"""New weights through vLLM's own protocol: start, any number of updates, finish.

The trainer's parameters lie in a safetensors file (``/dev/shm`` is memory). Each worker reads it, gives experts that
came packed to our emulation, and hands the others under checkpoint names to the model's own loader, so fusing and
splitting stay vLLM's business. At the finish every layer repacks what it was given. Between the two the model holds a
mixture, and nothing may be generated.

On a GPU the same protocol runs with vLLM's ``nccl`` and ``ipc`` backends; this one needs neither a group nor a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from tracefp4.errors import SyncError
from tracefp4.integrations.engines.experts import place_packed
from tracefp4.integrations.vllm.experts import PlainMethod
from tracefp4.integrations.vllm.session import recorder, session
from tracefp4.models.weight_file import read_weights


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One part of the weights."""

    path: str
    """A file that :func:`tracefp4.models.weight_file.write_weights` wrote, with the trainer's names."""
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
            SyncError: these are not the model's tensors, the loader took none of them, or experts came packed that vLLM
                keeps itself.
            FormatError: the file is not whole.
        """
        model: Any = self.model
        ours, state = session(), read_weights(Path(update_info.path))
        ours.names.check(state, ours.recorder.spec.weights)
        place_packed(ours.names, state, ours.experts, "vLLM")
        tied = set(ours.names.tied)
        found = ours.names.checkpoint(state)
        if not model.load_weights((name, tensor) for name, tensor in found.items() if name not in tied):
            raise SyncError(f"vLLM's loader took no tensor of {update_info.path!r}")
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
