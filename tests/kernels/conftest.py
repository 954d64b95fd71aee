"""Kernels on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.formats.numerics import Numerics, get_numerics
from tracefp4.kernels.runtime import SWITCH
from tracefp4.rollout.capture import Capture

# PyTorch notes once which functions a default device is for, and it must not note those that stand in for them below.
with torch.device("meta"):
    torch.empty(0)

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture
def device(kernel_device: torch.device) -> torch.device:
    """Where kernels run: compiled on a GPU, interpreted on a machine without one."""
    return kernel_device


def _values(rows: int, width: int, kind: str = "normal", seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 3
    if kind == "wide":
        x = x * torch.exp(4 * torch.randn(rows, width // 16, generator=generator)).repeat_interleave(16, -1)
    if kind == "ties":
        x = torch.randint(-24, 25, (rows, width), generator=generator) / 4
    if kind == "edges":
        x[0] = 0.0
        x[1, :16] = 0.0
        x[1, 16:32] = -0.0
        x[2, 3] = float("inf")
        x[2, 20] = -float("inf")
        x[3, 5] = float("nan")
        x[4] *= 1e-38
        x[5] *= 1e-30
        x[5, 0] = 1e30
        x[6, :16] *= 1e-4
    return x.to(dtype)


@pytest.fixture
def make_values() -> Callable[..., Tensor]:
    """Random data: ``make_values(rows, width, kind, seed, dtype)``; kind ``normal``, ``wide``, ``ties``, ``edges``."""
    return _values


def _same(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, any NaN equal to any other."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = found.cpu(), expected.cpu()
    if not found.dtype.is_floating_point:
        return bool(torch.equal(found, expected))
    kind = torch.int32 if found.dtype is torch.float32 else torch.int16
    nan = found.isnan() & expected.isnan()
    return bool(((found.contiguous().view(kind) == expected.contiguous().view(kind)) | nan).all())


@pytest.fixture
def same() -> Callable[[Tensor, Tensor], bool]:
    """Compare bit patterns."""
    return _same


@pytest.fixture
def capture_of() -> Callable[..., tuple[Capture, Numerics]]:
    """``capture_of(name, width, bits, device)``: rows for experts' inputs of two layers, full of 77, and numerics."""

    def make(name: str, width: int, bits: int, device: torch.device) -> tuple[Capture, Numerics]:
        n = get_numerics(name)
        shapes = tuple(
            SiteShape(Site(layer, kind), vectors, width, n.block, n.scope == "token")
            for layer in (0, 1)
            for kind, vectors in ((Kind.EXPERTS_IN, 1), (Kind.EXPERTS_MID, 3))
        )
        layout: Any = SimpleNamespace(moe_layers=(), num_experts=4, top_k=3)
        capture = Capture(layout, shapes, bits, 9, device)
        capture._rows.fill_(77)
        return capture, n

    return make


@pytest.fixture
def plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels that a test calls itself: where they are interpreted, others would compute what is expected."""
    monkeypatch.setenv(SWITCH, "reference")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds what no kernel writes, so that what is left unwritten shows: NaN, or numbers out of range."""

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            if made.dtype.is_floating_point:
                poison = float("nan")
            else:
                poison = {torch.uint8: 0xAB, torch.int8: -0x55, torch.bool: True}.get(made.dtype, -12345)
            with torch.no_grad():
                return made.fill_(poison)

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
