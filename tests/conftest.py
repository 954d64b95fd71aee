"""What tests of several packages share."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Tests of kernels interpret them. Triton reads this when it is imported, which a compiler of PyTorch may do first.
    os.environ["TRITON_INTERPRET"] = "1"

# Examples are small, but a busy machine can stall any of them; a time limit for each would only make tests flaky.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU and, in a variant of its own that skips itself elsewhere, a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def every_bfloat16() -> torch.Tensor:
    """All 65536 bfloat16 bit patterns as float32."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


@pytest.fixture
def rerun():
    """Captures functions by running them again, for machines without CUDA graphs."""

    def capture(bodies):
        captured = []
        for body in bodies:
            results = body()

            def replay(body=body, results=results):
                with torch.no_grad():
                    for old, new in zip(results, body(), strict=True):
                        old.copy_(new)

            captured.append((results, replay))
        return captured

    return capture
