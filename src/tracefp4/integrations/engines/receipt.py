"""From a host's reply to a rollout: tokens from the message, routes from the shared folder, the frame when wanted."""

from __future__ import annotations

from torch import Tensor

from tracefp4.core import Handle, Request, Rollout
from tracefp4.guidance.store import Store
from tracefp4.integrations.engines.handover import Folder, read_routes
from tracefp4.integrations.engines.wire import Finished, Parcel
from tracefp4.rollout.engine import EngineStats


def receive(folder: Folder, store: Store | None, request: Request, sample: int, reply: Finished) -> Rollout:
    """A finished sample; its frame is kept by ``store``, which may leave it in the folder until it is claimed."""
    guidance = None
    if reply.guidance is not None and store is not None:
        guidance = folder.offer(_handle(folder, reply.guidance), store)
    routes = None
    if reply.routes is not None:
        parcel = reply.routes
        routes = read_routes(folder.take(_handle(folder, parcel)), tuple(parcel.shape), parcel.dtype)
    return _rollout(request, sample, reply, routes, guidance)


def discard(folder: Folder, request: Request, sample: int, reply: Finished) -> Rollout:
    """A sample that was given up; what it left in the folder is removed."""
    for parcel in (reply.guidance, reply.routes):
        if parcel is not None:
            folder.take(_handle(folder, parcel))
    rollout = _rollout(request, sample, reply, None, None)
    rollout.finish_reason = "abort"
    return rollout


def count(stats: EngineStats, rollout: Rollout, reply: Finished) -> None:
    """Add a finished sample to the statistics."""
    stats.finished += 1
    stats.prefill_tokens += len(rollout.prompt_ids) - reply.cached_tokens
    stats.shared_tokens += reply.cached_tokens
    stats.decode_tokens += len(reply.tokens) - 1
    stats.retractions += reply.retractions
    stats.invalid_rows += reply.invalid_rows
    stats.guidance_bytes += rollout.guidance.nbytes if rollout.guidance is not None else 0


def _handle(folder: Folder, parcel: Parcel) -> Handle:
    return Handle(str(folder.frames), parcel.key, parcel.nbytes)


def _rollout(request: Request, sample: int, reply: Finished, routes: Tensor | None, guidance: Handle | None) -> Rollout:
    return Rollout(
        request_id=request.id,
        sample=sample,
        prompt_ids=request.prompt_ids,
        response_ids=tuple(reply.tokens),
        logprobs=tuple(reply.logprobs),
        weight_version=reply.version,
        finish_reason=reply.finish,
        routes=routes,
        guidance=guidance,
    )
