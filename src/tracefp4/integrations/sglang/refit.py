"""New weights: through SGLang's bracketed protocol and its own loader, then a checksum of what it serves.

::

    begin_weight_update    layouts that loading repacked are restored
    update_weights_from_tensor(load_format=LOADER)    our loader reads the trainer's tensors out of a file
    end_weight_update      SGLang re-runs its post-processing, in which experts are packed that did not come so
    tracefp4_report        the checksum over SGLang's parameters, cut into the trainer's tensors

The tensors do not travel in the message: its only entry is a name that says where the file is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.errors import SyncError
from tracefp4.integrations.engines.coverage import reported_formats
from tracefp4.integrations.engines.experts import place_packed
from tracefp4.integrations.engines.weights import Served
from tracefp4.integrations.sglang.native import native_lines, site_table
from tracefp4.integrations.sglang.placing import modelopt_tensors
from tracefp4.integrations.sglang.stored import PARTS, stored_experts
from tracefp4.integrations.sglang.worker import layer_of, worker
from tracefp4.models.packing import PackedWeight
from tracefp4.models.weight_file import read_weights

LOADER = "tracefp4.integrations.sglang.refit.load_file"
"""Name of the loader, for ``custom_weight_loader`` and ``load_format``."""


def announcement(path: str, version: int) -> list[tuple[str, Tensor]]:
    """What ``update_weights_from_tensor`` sends: where the weights are."""
    return [(json.dumps({"path": path, "version": version}), torch.zeros(1))]


def load_file(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """The loader: called by SGLang between begin and end.

    Raises:
        SyncError: the file does not hold exactly the model's tensors, or experts that SGLang's own kernels do not take.
        FormatError: the file is not whole.
    """
    told = json.loads(named_tensors[0][0])
    ours = worker()
    state = read_weights(Path(told["path"]))
    ours.names.check(state, ours.spec.weights)
    own: dict[str, Tensor] = {}
    if ours.settings.emulate:
        place_packed(ours.names, state, ours.experts, "SGLang")
    else:
        own = modelopt_tensors(ours.names, state, ours.quantization)
    held = dict(model.named_parameters(remove_duplicate=False))
    second = {name for name in ours.names.tied if name not in held}
    found = ours.names.checkpoint(state) | own
    model.load_weights((name, tensor) for name, tensor in found.items() if name not in second)
    if ours.recording:
        ours.recorder.new_weights(int(told["version"]))


def report(scheduler: Any, path: str) -> None:
    """A method of SGLang's scheduler, called by name: write what is served to a file.

    Raises:
        SyncError: a tensor of the trainer's is not served.
    """
    ours = worker()
    model = scheduler.tp_worker.model_runner.model
    packed, stacked = ours.packed(), dict[tuple[int, str], Tensor]()
    digest, fault = "", ""
    try:
        _read(model, packed, stacked)
        digest = Served(ours.names, dict(model.named_parameters(remove_duplicate=False)), packed, stacked).digest()
    except SyncError as error:
        fault = str(error)
    emulated = sorted(set(ours.experts) | ours.routers)
    table = {
        "digest": digest,
        "fault": fault,
        "version": ours.recorder.version,
        "formats": reported_formats(ours.recorder, sorted(packed), emulated),
        "sites": [[x.site, x.path, x.codes, x.scales, x.state, x.note] for x in site_table(ours) + native_lines()],
        "bytes": ours.recorder.nbytes,
    }
    Path(path).write_text(json.dumps(table), encoding="utf-8")


def _read(model: Any, packed: dict[tuple[int, str], PackedWeight], stacked: dict[tuple[int, str], Tensor]) -> None:
    """Add experts that SGLang keeps in FP4 itself to ``packed``, and all others to ``stacked``."""
    ours = worker()
    for module in model.modules():
        weights: list[Any] = [getattr(module, f"{part}_weight", None) for part in PARTS.values()]
        if any(weight is None for weight in weights):
            continue
        kept = stored_experts(module)
        for projection, weight in zip(PARTS, weights, strict=True):
            key = layer_of(module), projection
            if projection in kept:
                packed[key] = ours.names.packed(*key, kept[projection], ours.spec)
            else:
                stacked[key] = weight.detach()
