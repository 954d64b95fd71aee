"""New weights to a hosted engine: a file in the shared folder, and the checksum that comes back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import save_file
from torch import Tensor

from tracefp4.errors import EngineError, SyncError
from tracefp4.integrations.engines.handover import Folder
from tracefp4.integrations.engines.process import HostProcess
from tracefp4.integrations.engines.weights import Names
from tracefp4.integrations.engines.wire import Load, Loaded

LIMIT = 600.0
"""Seconds that an engine has to take its weights."""


def push_weights(
    host: HostProcess, folder: Folder, names: Names, dtype: torch.dtype, state: Mapping[str, Tensor], version: int
) -> str:
    """Send every parameter and return the checksum of what the engine serves then.

    Args:
        host: the engine's process.
        folder: shared with it.
        names: of the model.
        dtype: that the engine computes in.
        state: every parameter by name.
        version: of the weights.

    Raises:
        SyncError: a tensor is missing, unknown or of another shape or dtype, or the weights did not arrive.
    """
    names.check(state)
    for name in names.parameters:
        if state[name].dtype != dtype:
            raise SyncError(
                f"{name!r} is {state[name].dtype}, the engine computes in {dtype}; convert it first, as the trainer's "
                "own forward does, so that both sides quantize the same numbers"
            )
    path = folder.path / "weights.safetensors"
    # Stored slices would bring their whole tensor along, so each is made contiguous.
    save_file({name: state[name].detach().cpu().contiguous() for name in names.parameters}, path)
    try:
        host.channel.send(Load(str(path), version))
        reply = host.reply(LIMIT)
    except EngineError as error:
        raise SyncError(f"the weights of version {version} did not arrive: {error}") from error
    finally:
        path.unlink(missing_ok=True)
    if not isinstance(reply, Loaded) or reply.version != version:
        raise SyncError(f"the engine did not confirm the weights of version {version}")
    return reply.digest
