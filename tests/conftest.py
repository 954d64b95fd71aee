"""What tests of several packages share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

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


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where kernels run: compiled on a GPU, interpreted on a machine without one."""
    from tracefp4.kernels.runtime import interpreted

    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield torch.device("cuda")
    elif torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    elif importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is missing")
    else:
        with interpreted(), pytest.MonkeyPatch.context() as patch:
            _let_ranges_have_tensor_bounds(patch)
            yield torch.device("cpu")


def _let_ranges_have_tensor_bounds(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter calls ``int`` on an array of one element, which NumPy 2.4 refuses."""
    import triton.runtime.interpreter as interpreter

    original = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None:
        return  # another version

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


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
