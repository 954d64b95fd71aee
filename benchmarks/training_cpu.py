"""A training step on a CPU: its time, and what waits for the backward pass, as ratios to bfloat16.

    python benchmarks/training_cpu.py

Two layers of the SmolLM2-MoE shape, random weights, one thread. Time is that of the process (other programs on the
machine do not count), the median of rounds in which every arm takes one optimizer step, so that drift hits all alike.
Memory is counted, not sampled: bytes of distinct tensors that autograd saves of one micro-batch, weights left out, and
bytes of weights that are kept beside the parameters. Those are cached ones, and float32 copies that a CPU multiplies in
the place of bfloat16 weights, which it saves with each product (a GPU makes none).
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from statistics import median

import torch

from tracefp4.evaluation.bench_train import ARMS, Arm, Case, Shape
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bound
from tracefp4.training.policy import score_tokens
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import WeightOperands

SHAPE = Shape(2, 576, 9, 3, 64, 8, 2, 1536, 4096)
NAMES = ("bf16", "fp4 qat", "fp4 guided", "fp4 guided, packed weights")
ROUNDS = 3


def times(case: Case) -> dict[str, float]:
    """Seconds of the process for a step of each arm."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(ROUNDS + 1):
        for name in NAMES:
            with case.step(ARMS[name]) as step:
                start = time.process_time()
                step()
                if turn:
                    found[name].append(time.process_time() - start)
    return {name: median(samples) for name, samples in found.items()}


def saved(case: Case, arm: Arm, pack: bool) -> tuple[float, float]:
    """Saved bytes of activations a row, and MiB of weights beside the parameters."""
    spec, tensors = get_spec(arm.spec), {}
    sites = TrainerSites(case.layout, spec, weights=WeightOperands(spec.weights, arm.cache))
    sites.pack_saved = pack
    batch = case.collate(case.micro_batches[0], arm)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with ExitStack() as stack:
        stack.enter_context(bound(case.model, sites))
        stack.enter_context(sites.batch(batch))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        score_tokens(case.model, batch)
        known = {p.untyped_storage().data_ptr() for p in (*case.model.parameters(), *sites.weights.tensors())}
    shapes = {p.shape for p in case.model.parameters()}
    # Activations have an axis of 128 or 256 rows, which no weight of this shape has.
    bytes_of = {False: 0, True: sites.weights.nbytes()}
    for at, tensor in tensors.items():
        if at not in known:
            copied = tensor.dtype is torch.float32 and tensor.shape in shapes
            bytes_of[copied] += tensor.untyped_storage().nbytes()
    return bytes_of[False] / batch.real.numel(), bytes_of[True] / 2**20


def main() -> int:
    """Print both tables."""
    torch.set_num_threads(1)
    case = Case.make(SHAPE, 2, 128, torch.device("cpu"))
    case.prepare(NAMES)
    found = times(case)
    for name, seconds in found.items():
        print(f"{name:28} {seconds:6.2f} s  {seconds / found['bf16']:.2f} x bf16, layers recomputed")
    case = Case.make(SHAPE, 1, 128, torch.device("cpu"), recompute=False)
    case.prepare(NAMES)
    base = saved(case, ARMS["bf16"], False)[0]
    for name in NAMES:
        for pack in (False, True) if name != "bf16" else (False,):
            activations, weights = saved(case, ARMS[name], pack)
            kept = "codes " if pack else "values"
            ratio = f"{activations / base:.2f} x bf16"
            print(f"{name:28} {kept} kept: {activations:7.0f} B a row, {ratio}; {weights:4.0f} MiB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
