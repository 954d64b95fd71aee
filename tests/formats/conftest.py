"""Data and numerics that several tests of formats use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tracefp4.formats.numerics import Numerics, get_numerics


def _samples(kind: str, rows: int = 24, width: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 3
    if kind == "wide":
        x = x * torch.exp(4 * torch.randn(rows, width // 16, generator=generator)).repeat_interleave(16, -1)
    if kind == "outlier":
        x[:, 5] *= 1e4
    return x.bfloat16() if kind != "float32" else x


def _row_scope(name: str) -> Numerics:
    n = get_numerics(name)
    return replace(n, scope="token") if n.scope == "tensor" else n


@pytest.fixture(scope="session")
def samples() -> Callable[..., Tensor]:
    """Random data: ``samples(kind, rows, width, seed)``, kind ``normal``, ``wide``, ``outlier`` or ``float32``."""
    return _samples


@pytest.fixture(scope="session")
def row_scope() -> Callable[[str], Numerics]:
    """The numerics of a name, with one global scale a row where it would be one a tensor."""
    return _row_scope
