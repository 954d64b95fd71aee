"""Token log-probabilities and entropies of a policy, with memory that does not grow with the vocabulary.

The logits of a batch would be the largest tensor of the whole step (tokens x vocabulary x 4 bytes), so the hidden
states of response tokens go through the output head in chunks, and each chunk is recomputed in the backward pass.
Log-probs are taken in FP32 of the bfloat16 logits divided by the temperature, before any truncation: the definition
that the engine uses as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tracefp4.errors import ModelError
from tracefp4.kernels.runtime import usable
from tracefp4.training.batch import MicroBatch
from tracefp4.training.graphs import DecoderGraphs

SCORE = "tracefp4_score"
"""Attribute of a sharded model: :func:`score_whole` as a method that gathers the weights first."""


def token_logprobs(model: Any, batch: MicroBatch, temperature: float = 1.0, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the response tokens of a micro-batch.

    Args:
        model: a causal language model of transformers, bound to its sites (:mod:`tracefp4.training.sites`).
        batch: the micro-batch; padding is on the right, so no attention mask is needed.
        temperature: divides the logits.
        chunk: tokens whose logits exist at once.

    Returns:
        ``(logprobs, entropy)``, each ``(B, S)`` float32 and 0 outside the response; the entropy carries no gradient.
    """
    scored = score_tokens(model, batch, temperature, chunk)
    return scored.logprobs, scored.entropy


class TokenScores(NamedTuple):
    """What a forward pass says of the response tokens."""

    logprobs: Tensor
    """``(B, S)`` float32, 0 outside the response."""
    entropy: Tensor
    """``(B, S)`` float32 without gradient, 0 outside the response."""
    top: Tensor | None
    """``(T, k)`` float32: log-probs of the sampler's likeliest tokens (``MicroBatch.top``), if the batch has them."""


def score_tokens(
    model: Any, batch: MicroBatch, temperature: float = 1.0, chunk: int = 4096, graphs: DecoderGraphs | None = None
) -> TokenScores:
    """As :func:`token_logprobs`, and the log-probs of the sampler's likeliest tokens where the batch has them.

    ``graphs``: what runs the decoder of ``model``, where it can.
    """
    gathering = getattr(model, SCORE, None)
    if gathering is not None:
        return gathering(batch, temperature, chunk)
    return score_whole(model, batch, temperature, chunk, graphs)


def score_whole(
    model: Any, batch: MicroBatch, temperature: float, chunk: int, graphs: DecoderGraphs | None = None
) -> TokenScores:
    """As :func:`score_tokens`, of a model whose weights are all there."""
    hidden = None if graphs is None else graphs.hidden(batch.input_ids, batch.real)
    if hidden is None:
        decoder = model.get_decoder()
        hidden = decoder(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head")
    rows = hidden.flatten(0, 1).index_select(0, batch.places)
    targets = batch.targets.flatten().index_select(0, batch.places)
    likeliest = None if batch.top is None else batch.top.ids
    pieces = []
    # One gradient of all pieces: slices would each give one of the whole.
    for index, (some, theirs) in enumerate(zip(rows.split(chunk), targets.split(chunk), strict=True)):
        top = None if likeliest is None else likeliest[index * chunk : (index + 1) * chunk]
        part = (head, some, theirs, top, temperature)
        pieces.append(
            checkpoint(_head_logprobs, *part, use_reentrant=False) if torch.is_grad_enabled() else _head_logprobs(*part)
        )
    logprobs, entropy = (spread(torch.cat([piece[i] for piece in pieces]), batch) for i in range(2))
    return TokenScores(logprobs, entropy, None if likeliest is None else torch.cat([piece[2] for piece in pieces]))


def spread(values: Tensor, batch: MicroBatch) -> Tensor:
    """Put values of the response tokens ``(T,)`` in their places; ``(B, S)``, 0 elsewhere."""
    return values.new_zeros(batch.response.numel()).index_copy(0, batch.places, values).view(batch.response.shape)


def recompute_layers(model: Any) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping what it computed.

    Transformers renamed the switch: the old name warns from 5.24 on and goes in 6, the new one is not in 5.17.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _head_logprobs(
    head: nn.Module, rows: Tensor, targets: Tensor, top: Tensor | None, temperature: float
) -> tuple[Tensor, ...]:
    logits = head(rows)
    if top is None and logits.dtype is torch.bfloat16 and usable(logits):
        return _TokenScores.apply(logits.contiguous(), targets, temperature)
    logits = logits.float()
    logs = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    chosen = logs.gather(-1, targets[:, None]).squeeze(-1)
    likeliest = None if top is None else logs.gather(-1, top)
    with torch.no_grad():  # last, where the backward pass, which does not need it, no longer comes
        entropy = -(logs.exp() * logs).sum(-1)
    return (chosen, entropy) if likeliest is None else (chosen, entropy, likeliest)


class _TokenScores(torch.autograd.Function):
    """Log-probabilities and entropies of :func:`_head_logprobs` by kernel; entropies have no gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        from tracefp4.kernels.token_scores import token_scores

        logprobs, entropy, lse = token_scores(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from tracefp4.kernels.token_scores import token_scores_backward

        logits, targets, lse = ctx.saved_tensors
        return token_scores_backward(grads[0].contiguous(), logits, targets, lse, ctx.temperature), None, None
