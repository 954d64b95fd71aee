"""Supervised warm start: teach the format and a first accuracy, so that RL has groups with mixed outcomes.

Plain next-token cross-entropy on gold completions, the same start for every method of a comparison. It is in bfloat16
unless ``warm_start.spec`` says otherwise: a small model that was never trained under FP4 loses most of its accuracy to
it, and RL in FP4 would then first have to repair what a large model never loses; a quantization-aware start leaves all
arms near each other, and arms without FP4 start from the same weights.

It is deterministic on one machine, and cached under a hash of everything that is known to shape it: model weights,
task, settings, seed, and the micro-batches, kind of device, its model and version of torch, on which bfloat16 results
depend in the last bits. Something else may shape it all the same, such as a library's choice of kernel. So what names a
start has two halves, of that hash and of a digest of the weights that came of it. The name is recorded in the run, and
runs with different names must not be paired.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tracefp4.config import OptimizerConfig, WarmStartConfig
from tracefp4.errors import CheckpointError
from tracefp4.formats.spec import DEFAULT_NVFP4, Spec, get_spec
from tracefp4.models.binding import bind, unbind
from tracefp4.models.layout import describe
from tracefp4.models.packing import model_digest
from tracefp4.training.batch import Example, collate, plan_micro_batches
from tracefp4.training.checkpoint import restore
from tracefp4.training.graphs import DecoderGraphs, padded_width, refusal
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.policy import score_tokens
from tracefp4.training.sites import TrainerSites

FORMAT = 5
"""Raise when a change of this file changes the result."""

Pairs = Callable[[int], Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]
"""``step -> [(prompt ids, completion ids)]``: the batch of one step."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a run began from."""

    name: str
    """The same in every run that begins from equal weights, made from equal settings."""
    inputs: str
    """Hash of what shapes it, the same wherever it is made."""
    seconds: float
    """Time that it took to make it, to wait for whoever made it, or to load it."""

    def of(self, checkpoint: str, needed: bool) -> WarmStart:
        """The start of a run that goes on from a checkpoint.

        Args:
            checkpoint: name of the start that the checkpoint's run began from; empty if it was not recorded.
            needed: whether its weights are, as those of the reference policy.

        Raises:
            CheckpointError: they are needed, and these are others.
        """
        if needed and checkpoint not in ("", self.name):
            raise CheckpointError(
                f"the checkpoint's run began from warm start {checkpoint}, and what the same settings make here is "
                f"{self.name}: loss.kl needs the same reference policy; resume where the run began, or start it anew"
            )
        return replace(self, name=checkpoint or self.name)


def warm_start(
    model: nn.Module,
    config: WarmStartConfig,
    pairs: Pairs,
    *,
    identity: dict[str, object],
    cache: Path,
    micro_tokens: int,
    numerics: str = DEFAULT_NVFP4,
    cuda_graphs: bool = False,
    progress: Callable[[int, float], None] | None = None,
) -> WarmStart:
    """Fine-tune ``model`` in place, or load the cached result.

    Args:
        model: causal language model; not bound to sites.
        config: steps, batch, learning rate.
        pairs: training data by step.
        identity: whatever else shapes the data (task, seed); part of the cache key. JSON values.
        cache: folder of cached warm starts.
        micro_tokens: padded rows a micro-batch.
        numerics: preset of FP4 arithmetic, of effect if ``config.spec`` quantizes anything.
        cuda_graphs: run the decoder as CUDA graphs where that is possible.
        progress: called with the step and its loss.

    Raises:
        FormatError: unknown spec, or one that ``numerics`` does not fit.

    Returns:
        The start's name and what stands behind it.
    """
    began, spec = time.monotonic(), get_spec(config.spec, numerics)
    before = model_digest(model, describe(model), None)
    key: dict[str, object] = {"format": FORMAT, "model": before, "config": config.model_dump(), "identity": identity}
    device = next(model.parameters()).device
    captured = cuda_graphs and device.type == "cuda"
    key |= {"micro_tokens": micro_tokens, "device": device.type, "cuda_graphs": captured}
    if config.spec != "bf16":
        key["numerics"] = numerics
    inputs = _hash(key)
    if config.steps == 0:
        return WarmStart(_name(inputs, before), inputs, time.monotonic() - began)
    stem = f"{inputs}-{_hash(_machine(device))[:8]}"
    file = cache / f"{stem}.safetensors"
    cache.mkdir(parents=True, exist_ok=True)
    # Runs of a comparison that go on side by side begin from one start: the first makes it, the others wait for it.
    with FileLock(cache / f"{stem}.lock"):
        if file.is_file():
            restore(model, load_file(file), f"warm start {file}")
        else:
            _fine_tune(model, config, spec, pairs, micro_tokens, cuda_graphs, progress)
            temporary = file.with_suffix(f".writing-{os.getpid()}")
            save_file({n: p.detach().contiguous().cpu() for n, p in model.named_parameters()}, temporary)
            temporary.rename(file)
    after = model_digest(model, describe(model), None)
    return WarmStart(_name(inputs, after), inputs, time.monotonic() - began)


def _hash(key: dict[str, object]) -> str:
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()


def _name(inputs: str, weights: str) -> str:
    return f"{inputs[:12]}-{weights[:12]}"


def _machine(device: torch.device) -> dict[str, object]:
    """What a cached start is not carried over from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"torch": torch.__version__, "device": name}


def _fine_tune(
    model: nn.Module,
    config: WarmStartConfig,
    spec: Spec,
    pairs: Pairs,
    micro_tokens: int,
    cuda_graphs: bool,
    progress: Callable[[int, float], None] | None,
) -> None:
    layout = describe(model)
    sites = TrainerSites(layout, spec)
    bind(model, sites)
    balance = LoadBalance(model, layout.routers.values(), layout.num_experts) if config.router_aux > 0 else None
    optimizer = MasterAdamW(
        model.named_parameters(), OptimizerConfig(lr=config.lr, weight_decay=config.weight_decay, beta2=0.99)
    )
    possible = cuda_graphs and refusal(model, sites) is None
    graphs = DecoderGraphs(model, sites, micro_tokens, aside=balance) if possible else None
    fine_tuning = _FineTuning(model, sites, optimizer, micro_tokens, config.router_aux, balance, graphs)
    try:
        for step in range(config.steps):
            examples = [
                Example(tokens=prompt + completion, prompt_length=len(prompt), index=i)
                for i, (prompt, completion) in enumerate(pairs(step))
            ]
            loss = fine_tuning.backward(examples)
            optimizer.step(lr=_schedule(step, config))
            if progress is not None:
                progress(step, loss)
    finally:
        if balance is not None:
            balance.close()
        unbind(model)
    if possible:
        del fine_tuning, graphs
        torch.cuda.empty_cache()  # what graphs held is of no use to anybody else


@dataclass(frozen=True, slots=True)
class _FineTuning:
    """What gradients are made with."""

    model: nn.Module
    sites: TrainerSites
    optimizer: MasterAdamW
    micro_tokens: int
    router_aux: float
    balance: LoadBalance | None
    graphs: DecoderGraphs | None

    def backward(self, examples: Sequence[Example]) -> float:
        """Add up the gradients of one step; returns the mean cross-entropy of its completion tokens."""
        device = next(self.model.parameters()).device
        total = sum(len(e.tokens) - e.prompt_length for e in examples)
        losses = []
        width = None if self.graphs is None else padded_width
        for group in plan_micro_batches(examples, self.micro_tokens, width):
            batch = collate(group, device)
            if self.balance is not None:
                self.balance.start()
            with self.sites.batch(batch):
                loss = -score_tokens(self.model, batch, graphs=self.graphs).logprobs.sum() / total
                losses.append(loss.detach())
                if self.balance is not None:
                    beside = None if self.graphs is None else self.graphs.beside
                    beside = self.balance.take(batch.real) if beside is None else beside
                    loss = loss + self.router_aux * beside * (len(group) / len(examples))
                loss.backward()
            self.optimizer.collect()
        return float(torch.stack(losses).sum())


def _schedule(step: int, config: WarmStartConfig) -> float:
    """Linear warm-up over the first tenth, then cosine decay to a tenth of the peak."""
    rise = max(1, config.steps // 10)
    if step < rise:
        return config.lr * (step + 1) / rise
    phase = (step - rise) / max(1, config.steps - rise)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * phase))


class LoadBalance:
    """Load-balancing loss of the routers, read from their logits.

    For each router ``E * sum_e f_e * p_e`` with ``f_e`` the share of tokens that chose expert ``e`` (divided by top-k)
    and ``p_e`` its mean probability (Switch Transformer, arXiv 2101.03961, equation 4); 1 when balanced.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], num_experts: int) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._num_experts = num_experts
        self._hooks = [model.get_submodule(name).register_forward_hook(self._see) for name in names]

    def _see(self, module: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._seen.append((output[0], output[2]))

    def start(self) -> None:
        """Forget what ran before: gradient checkpointing runs the routers again in the backward pass."""
        self._seen.clear()

    def take(self, real: Tensor) -> Tensor:
        """The mean loss over the routers that ran since :meth:`start`; ``real (B, S)`` marks tokens that count."""
        mask = real.reshape(-1, 1).float()
        losses = []
        for logits, indices in self._seen:
            share = torch.zeros(self._num_experts, device=logits.device)
            share.scatter_add_(0, indices.reshape(-1), mask.expand(-1, indices.shape[-1]).reshape(-1))
            probability = (logits.float().softmax(-1) * mask).sum(0) / mask.sum()
            losses.append(self._num_experts * (share / share.sum() * probability).sum())
        return torch.stack(losses).mean()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
