"""Whether Triton kernels are used for a tensor.

They are for CUDA tensors, where Triton is installed. ``TRACEFP4_KERNELS=reference`` turns them off, which is how one
finds out whether a kernel is to blame. Triton can also *interpret* a kernel on CPU tensors, statement by statement in
NumPy: far too slow to use, and exactly what a test without a GPU needs. Triton reads ``TRITON_INTERPRET`` when a kernel
is defined, so it must be set before the first kernel is imported; :func:`interpreted` then admits CPU tensors.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tracefp4.errors import ConfigError

SWITCH = "TRACEFP4_KERNELS"
"""Environment variable: ``triton`` (the default) or ``reference``."""

_interpreting = False


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Whether a Triton kernel takes ``x``: it lies on a CUDA device, or kernels are being interpreted."""
    if not (x.is_cuda or _interpreting) or not installed():
        return False
    choice = os.environ.get(SWITCH, "triton")
    if choice not in ("triton", "reference"):
        raise ConfigError(f"{SWITCH} is {choice!r}; valid are 'triton' and 'reference'.")
    return choice == "triton"


@functools.cache
def _major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def warp_groups(x: Tensor) -> bool:
    """Whether ``x`` lies on a GPU that multiplies in warp groups (``wgmma``), which Hopper alone does."""
    return x.is_cuda and torch.version.cuda is not None and _major(x.device.index or 0) == 9


@functools.cache
def _shared_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory that a program may have where ``x`` lies; 0 where nothing is compiled."""
    return _shared_memory(x.device.index or 0) if x.is_cuda else 0


@contextmanager
def interpreted() -> Iterator[None]:
    """Use kernels for CPU tensors too, through Triton's interpreter. For tests.

    Raises:
        ConfigError: Triton is missing, or was not told to interpret.
    """
    global _interpreting
    if not installed() or os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("interpreting kernels needs Triton and TRITON_INTERPRET=1, set before kernels are imported.")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
