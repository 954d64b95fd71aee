"""New weights to a hosted engine: a file in the shared folder, and the checksum that comes back.

The trainer decides what travels (``rollout.refit``): expert weights in its own dtype, which the engine quantizes, or
packed, as codes and scales that the engine serves as they are. Everything else travels as it is. The checksum that
comes back is the same, because it is taken over packed weights either way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tracefp4.errors import EngineError, SyncError
from tracefp4.formats.numerics import Numerics
from tracefp4.integrations.engines.handover import Folder
from tracefp4.integrations.engines.process import HostProcess
from tracefp4.integrations.engines.weights import Names
from tracefp4.integrations.engines.wire import Load, Loaded
from tracefp4.models.packing import PackedWeight
from tracefp4.models.weight_file import write_weights

LIMIT = 600.0
"""Seconds that an engine has to take its weights."""


def push_weights(
    host: HostProcess,
    folder: Folder,
    names: Names,
    state: Mapping[str, Tensor | PackedWeight],
    version: int,
    *,
    dtype: torch.dtype,
    numerics: Numerics | None,
) -> tuple[str, int]:
    """Send every parameter.

    Args:
        host: the engine's process.
        folder: shared with it.
        names: of the model.
        state: every parameter by name; experts may be packed.
        version: of the weights.
        dtype: that the engine computes in.
        numerics: of its expert weights.

    Returns:
        Checksum of what the engine serves then, and the bytes of the tensors that were sent.

    Raises:
        SyncError: a tensor is missing, unknown, of another shape, dtype or numerics, or the weights did not arrive.
        FormatError: parts of a packed weight that do not fit one another.
    """
    names.check(state, numerics)
    sent = {name: state[name] for name in names.parameters}
    for name, tensor in sent.items():
        if isinstance(tensor, Tensor) and tensor.dtype != dtype:
            raise SyncError(
                f"{name!r} is {tensor.dtype}, the engine computes in {dtype}; convert it first, as the trainer's "
                "own forward does, so that both sides quantize the same numbers"
            )
    path = folder.path / "weights.safetensors"
    nbytes = write_weights(path, sent)
    try:
        host.channel.send(Load(str(path), version))
        reply = host.reply(LIMIT)
    except EngineError as error:
        raise SyncError(f"the weights of version {version} did not arrive: {error}") from error
    finally:
        path.unlink(missing_ok=True)
    if not isinstance(reply, Loaded) or reply.version != version:
        raise SyncError(f"the engine did not confirm the weights of version {version}")
    return reply.digest, nbytes
