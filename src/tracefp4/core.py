"""The vocabulary that both sides pass to each other.

A *site* is one quantized tensor of one layer. The rollout engine quantizes it once for each token, the trainer does so
again; guidance makes the second rounding follow the first. Everything here is plain data: no modules, no engine, no
trainer.

Alignment, once and for all: a rollout of ``N`` tokens (prompt and response) has ``N - 1`` *rows*. Row ``t`` belongs to
the forward pass of token ``t``; the last sampled token is never forwarded. The trainer forwards the same ``N - 1``
tokens and predicts tokens ``1..N-1``, so every row has its guidance and nothing is shifted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor


class Kind(StrEnum):
    """What tensor a site quantizes."""

    EXPERTS_IN = "experts_in"
    """Input of the experts' gate_up projection: one vector of ``hidden`` values a token, before top-k replication."""
    EXPERTS_MID = "experts_mid"
    """Input of the experts' down projection: one vector of ``intermediate`` values a token and expert slot."""
    K = "k"
    """Keys after RoPE, one vector of ``head_dim`` a token and KV head (for latent attention: the rotated part)."""
    V = "v"
    """Values, one vector of ``head_dim`` a token and KV head."""
    LATENT = "latent"
    """Multi-head latent attention: the normalised compressed KV vector of a token, from which K and V are expanded."""


KV_KINDS = (Kind.K, Kind.V, Kind.LATENT)
EXPERT_KINDS = (Kind.EXPERTS_IN, Kind.EXPERTS_MID)


@dataclass(frozen=True, order=True, slots=True)
class Site:
    """One quantized tensor of one decoder layer."""

    layer: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}"


@dataclass(frozen=True, slots=True)
class SiteShape:
    """The shape of one site's outcome for one token.

    ``vectors`` separate vectors of ``width`` values: 1 for ``experts_in`` and ``latent``, top-k for ``experts_mid``
    (slot order), KV heads for ``k`` and ``v``. ``block`` values share a block scale. ``token_scale`` says that each
    vector has a global scale of its own, which then travels as FP32; otherwise the global scale is a constant of the
    numerics.
    """

    site: Site
    vectors: int
    width: int
    block: int
    token_scale: bool

    @property
    def values(self) -> int:
        """Values a token."""
        return self.vectors * self.width

    @property
    def blocks(self) -> int:
        """Block scales a token."""
        return self.values // self.block


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Handle:
    """Where the guidance of one rollout lies. This travels with a batch; the bytes do not."""

    store: str
    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The ``k`` likeliest tokens at each of ``n`` response positions, likeliest first, on the host.

    Log-probs are those of :attr:`Rollout.logprobs`: of the sampling distribution at the request's temperature, before
    top-p and top-k.
    """

    ids: Tensor
    """int32 ``(n, k)``."""
    logprobs: Tensor
    """float32 ``(n, k)``."""


@dataclass(slots=True)
class Rollout:
    """What an engine produced for one sample of one prompt.

    ``logprobs[i]`` is the log-probability of ``response_ids[i]`` under the sampling distribution at the request's
    temperature, before top-p and top-k. ``routes`` has shape ``(N - 1, moe_layers, top_k)`` and an integer dtype wide
    enough for the number of experts; the axis ``moe_layers`` follows :attr:`ModelLayout.moe_layers`.
    """

    request_id: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    finish_reason: FinishReason
    routes: Tensor | None = None
    guidance: Handle | None = None
    top: TopLogprobs | None = None
    """Of every response token, if the request asked for them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response token ids."""
        return self.prompt_ids + self.response_ids

    @property
    def rows(self) -> int:
        """Rows of guidance and routes: tokens minus one (the last sampled token is never forwarded)."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine samples. ``top_p = 1`` and ``top_k = 0`` leave the distribution whole; training requires that."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to return at each response position, with their log-probs."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be sampled ``samples`` times. The prompt is prefilled once and shared among its samples."""

    id: str
    prompt_ids: tuple[int, ...]
    samples: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)


def route_dtype(num_experts: int) -> torch.dtype:
    """Smallest integer dtype that holds expert ids ``0..num_experts-1``: uint8 up to 256 experts, else int16."""
    return torch.uint8 if num_experts <= 256 else torch.int16
