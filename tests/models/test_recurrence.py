"""One token of a gated delta net in rows of a pool is what transformers computes on states that are passed around."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from tracefp4.models.recurrence import convolve, delta_rule

MODULES = ("qwen3_5_moe", "qwen3_next")


@pytest.fixture(params=MODULES)
def theirs(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_convolution_of_transformers(theirs, dtype, with_bias):
    g = torch.Generator().manual_seed(1)
    x, pool, weight, bias = (
        torch.randn(*shape, generator=g).to(dtype) for shape in ((3, 10), (5, 4, 10), (10, 4), (10,))
    )
    rows, before = torch.tensor([4, 0, 3]), pool.clone()
    passed = pool[rows].transpose(1, 2).contiguous()
    bias = bias if with_bias else None
    expected = theirs.causal_conv1d_update(x.unsqueeze(2), passed, weight, bias, "silu").squeeze(2)
    found = convolve(x, pool, rows, weight, bias)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(found, expected, **tolerance)
    assert torch.equal(pool[rows], passed.transpose(1, 2)), "the window is moved without rounding"
    assert torch.equal(pool[[1, 2]], before[[1, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "heads"), [(2, 2), (2, 6), (1, 4)])
def test_the_delta_rule_of_transformers(theirs, dtype, key_heads, heads):
    g = torch.Generator().manual_seed(heads)
    batch, key, value = 3, 8, 12
    width = key_heads * key
    mixed = torch.randn(batch, 2 * width + heads * value, generator=g).to(dtype)
    a, b = (3 * torch.randn(batch, heads, generator=g).to(dtype) for _ in range(2))
    a[0, 0] = 40.0  # where softplus is linear
    log_rate, dt_bias = (torch.randn(heads, generator=g).to(dtype) for _ in range(2))
    pool = torch.randn(5, heads, key, value, generator=g)
    rows, before = torch.tensor([4, 0, 3]), pool.clone()
    q, k, v = mixed.split([width, width, heads * value], dim=1)
    # Repeated beforehand, as older versions of transformers want it.
    q, k = (x.view(batch, 1, key_heads, key).repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
    rate = -log_rate.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    expected, state = theirs.torch_recurrent_gated_delta_rule(
        q, k, v.view(batch, 1, heads, value), g=rate.unsqueeze(1), beta=b.sigmoid().unsqueeze(1),
        initial_state=pool[rows], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found = delta_rule(mixed, a, b, log_rate, dt_bias, pool, rows)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected[:, 0], rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=1e-5)
    torch.testing.assert_close(pool[rows], state, rtol=1e-5, atol=1e-6)
    assert torch.equal(pool[[1, 2]], before[[1, 2]])


def test_a_bfloat16_state_is_rounded_once_a_step():
    g = torch.Generator().manual_seed(0)
    mixed, a, b = torch.randn(2, 3 * 16, generator=g), torch.randn(2, 1, generator=g), torch.randn(2, 1, generator=g)
    log_rate, dt_bias, rows = torch.zeros(1), torch.zeros(1), torch.tensor([1, 0])
    narrow = torch.randn(2, 1, 16, 16, generator=g).to(torch.bfloat16)
    wide = narrow.float()
    found = delta_rule(mixed, a, b, log_rate, dt_bias, narrow, rows)
    assert torch.equal(found, delta_rule(mixed, a, b, log_rate, dt_bias, wide, rows))
    assert torch.equal(narrow, wide.to(torch.bfloat16))
