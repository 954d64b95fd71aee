"""What one has without an engine: transformers' own ``generate``, compiled, and its forward pass over prompts.

A decode step is measured with a static cache. It has the length of the context that is measured, and attention reads
all of it whatever is filled, so a short prompt does. A step is the difference of two runs that differ in their number
of new tokens. On a GPU transformers compiles the forward pass by itself when the cache is static. Its experts are
computed by grouped products, at batch one by batched ones, which are faster there; left alone it would copy the experts
of every token at any batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tracefp4.evaluation.bench import wait_for
from tracefp4.evaluation.bench_shapes import random_model
from tracefp4.rollout.state import cache_keyword

PEER = "transformers"
"""Name of the arm."""
_PROMPT = 4
_FEW, _MANY = 4, 36
_RUNS = 3


@torch.no_grad()
def peer_step(config: Any, device: torch.device, batch: int, context: int, many: int = _MANY) -> float:
    """Median seconds of a decode step.

    Args:
        config: of the model, which gets random weights.
        device: where it runs.
        batch: sequences.
        context: length of the static cache.
        many: new tokens of the longer run, more than four.
    """
    from transformers import StaticCache

    from tracefp4.models.directory import quiet

    model = random_model(config, device)
    if device.type == "cuda":
        model.set_experts_implementation("batched_mm" if batch == 1 else "grouped_mm")
        model._optimize_model_for_decode = nullcontext
    cache = StaticCache(config=config, max_cache_len=context)
    prompt = torch.randint(config.vocab_size, (batch, _PROMPT), device=device)
    keyword = cache_keyword(model.get_decoder())

    def run(new: int) -> float:
        cache.reset()
        start = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, min_new_tokens=new,
            **{keyword: cache},
        )  # fmt: skip
        wait_for(device)
        return time.perf_counter() - start

    with quiet():
        run(_FEW)
        run(_FEW)
        samples = [(run(many) - run(_FEW)) / (many - _FEW) for _ in range(_RUNS)]
    return median(samples)


@torch.no_grad()
def peer_prefill(
    config: Any, device: torch.device, tokens: Tensor, chunk: int, compiled: bool = False
) -> Callable[[], object]:
    """A prefill, to be run often: as many whole prompts at once as a chunk holds, or one in pieces of a chunk.

    Args:
        config: of the model, which gets random weights and PyTorch's attention.
        device: where it runs.
        tokens: int64 ``(prompts, length)``, on that device.
        chunk: tokens of a forward pass.
        compiled: compile the forward pass, which then keeps no cache; for whole prompts only.
    """
    from transformers import DynamicCache

    model = random_model(config, device)
    model.set_attn_implementation("sdpa")
    if device.type == "cuda":
        model.set_experts_implementation("grouped_mm")
    keyword = cache_keyword(model.get_decoder())
    together, length = max(1, chunk // tokens.shape[1]), tokens.shape[1]
    whole = torch.compile(model, dynamic=False) if compiled else None

    @torch.no_grad()
    def run() -> None:
        for ids in tokens.split(together):
            if whole is not None:
                whole(input_ids=ids, use_cache=False, logits_to_keep=1)
                continue
            cache = DynamicCache(config=config)
            for start in range(0, length, chunk):
                piece = ids[:, start : start + chunk]
                model(input_ids=piece, use_cache=True, logits_to_keep=1, **{keyword: cache})

    return run
