"""Random numbers of each request's own.

SGLang draws all samples from one generator, so what a request samples depends on its neighbours; with
``--enable-deterministic-inference`` it has a seed for each request, but that switch also changes kernels, refuses
attention backends, and hashes with a Triton kernel. The sampler itself asks for seeds only. So they are handed to it:
the same request draws the same uniforms whatever else runs. On a CPU, where no Triton kernel runs, the hash is computed
in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MASK = 0xFFFFFFFF


def give_seeds(result: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``SamplingBatchInfo.from_schedule_batch(cls, batch, ...)``: seeds of requests that brought one."""
    batch = args[1]
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if result.sampling_seed is None and seeds and all(seed is not None for seed in seeds):
        result.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
    return result


def hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Instead of ``murmur_hash32`` where it cannot run: uniform 32-bit numbers ``(n, m)``, as int64.

    Args:
        seed: ``(n,)`` of each request.
        positions: ``(n,)`` of the token that is sampled.
        columns: ``(m,)`` ids of the vocabulary.
    """
    row = _mix(seed.view(torch.int64) * _PRIMES[0] + positions.to(torch.int64) * _PRIMES[1])
    return _mix(_mix(row.unsqueeze(1) + columns.to(torch.int64) * _PRIMES[2]))


def _mix(x: Tensor) -> Tensor:
    """Spread the bits of ``x`` over 32: multiplications and shifts in the manner of MurmurHash's finaliser."""
    x = (x ^ (x >> 32)) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
