"""Token log-probabilities and entropies of a policy, with memory that does not grow with the vocabulary.

The logits of a batch would be the largest tensor of the whole step (tokens x vocabulary x 4 bytes), so the hidden
states of response tokens go through the output head in chunks, and each chunk is recomputed in the backward pass.
Log-probs are taken in FP32 of the bfloat16 logits divided by the temperature, before any truncation: the definition
that the engine uses as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tracefp4.errors import ModelError
from tracefp4.training.batch import MicroBatch


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
    decoder = model.get_decoder()
    hidden = decoder(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head")
    rows, targets = hidden[batch.response], batch.targets[batch.response]
    pieces = []
    for start in range(0, rows.shape[0], chunk):
        part = (head, rows[start : start + chunk], targets[start : start + chunk], temperature)
        pieces.append(
            checkpoint(_head_logprobs, *part, use_reentrant=False) if torch.is_grad_enabled() else _head_logprobs(*part)
        )
    logprobs = torch.zeros(batch.response.shape, dtype=torch.float32, device=hidden.device)
    entropy = torch.zeros_like(logprobs)
    logprobs = logprobs.masked_scatter(batch.response, torch.cat([p for p, _ in pieces]))
    entropy = entropy.masked_scatter(batch.response, torch.cat([h for _, h in pieces]))
    return logprobs, entropy


def recompute_layers(model: Any) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping what it computed.

    Transformers renamed the switch: the old name warns from 5.24 on and goes in 6, the new one is not in 5.17.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _head_logprobs(head: nn.Module, rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(rows).float() / temperature
    logs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), entropy
