"""A router's choice equals plain PyTorch bit for bit, gate values included."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def exponential(x):
    """Of PyTorch on a GPU; the interpreter's is NumPy's."""
    return x.exp() if x.is_cuda else torch.from_numpy(np.exp(x.numpy()))


def plainly(logits, top_k, renormalise, dtype):
    """Gate values and experts, with the order of additions that the kernel promises."""
    experts = logits.shape[1]
    x = torch.nn.functional.pad(logits.float(), (0, -experts % 32), value=-float("inf"))
    # The kernel's vectors are powers of two; further groups of 32 add zeros.
    e = exponential(x - logits.float().amax(1, keepdim=True))
    groups = e.unflatten(1, (-1, 32))
    total = groups[:, 0]
    for group in range(1, groups.shape[1]):
        total = total + groups[:, group]
    while total.shape[1] > 1:
        total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
    p, chosen = (e / total)[:, :experts].sort(dim=1, descending=True, stable=True)
    p, chosen = p[:, :top_k], chosen[:, :top_k]
    if renormalise:
        whole = p[:, 0]
        for slot in range(1, top_k):
            whole = whole + p[:, slot]
        p = p / whole[:, None]
    return p.to(dtype), chosen


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    "tokens, experts, top_k", [(1, 8, 2), (7, 128, 8), (3, 60, 6), (2, 96, 1), (2, 256, 8), (5, 3, 3)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_choice_of_plain_pytorch(tokens, experts, top_k, renormalise, dtype, device, same):
    from tracefp4.kernels.choice import choose

    generator = torch.Generator().manual_seed(experts + tokens)
    logits = (3 * torch.randn(tokens, experts, generator=generator)).to(dtype).to(device)
    gates, chosen = choose(logits, top_k, renormalise=renormalise, dtype=dtype)
    expected = plainly(logits, top_k, renormalise, dtype)
    assert same(chosen, expected[1]) and same(gates, expected[0])
    p = torch.softmax(logits.float(), -1)
    p = p.gather(1, chosen) / (p.gather(1, chosen).sum(1, keepdim=True) if renormalise else 1)
    torch.testing.assert_close(gates, p.to(dtype), rtol=2e-6 if dtype is torch.float32 else 1e-2, atol=0)


def test_of_equal_experts_the_lower_comes_first(device, same):
    from tracefp4.kernels.choice import choose

    logits = torch.zeros(4, 40, dtype=torch.bfloat16)
    logits[1, 5::7] = 2.0
    logits[2] = torch.arange(40) % 3
    logits[3, 39] = 200.0  # all others underflow to zero
    _, chosen = choose(logits.to(device), 6, renormalise=True, dtype=torch.bfloat16)
    assert chosen.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [5, 12, 19, 26, 33, 0],
        [2, 5, 8, 11, 14, 17],
        [39, 0, 1, 2, 3, 4],
    ]


def test_logits_that_are_no_numbers_name_experts_all_the_same(device):
    """What multiplies next indexes weights with them."""
    from tracefp4.kernels.choice import choose

    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    logits[0, 3], logits[1, 3], logits[2] = float("nan"), float("inf"), -float("inf")
    gates, chosen = choose(logits.to(device), 4, renormalise=False, dtype=torch.float32)
    assert chosen[:3].tolist() == [[0, 1, 2, 3]] * 3 and gates[:3].isnan().all()
    assert gates[3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routes_are_recorded_in_the_rows_of_their_tokens_alone(dtype, device):
    from tracefp4.kernels.choice import choose

    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)).to(device)
    record = torch.full((9, 4, 2), 77, dtype=dtype, device=device)
    slots = torch.tensor([7, 0, 4], device=device)
    _, chosen = choose(logits, 2, renormalise=True, dtype=torch.float32, routes=record[:, 1], slots=slots)
    assert torch.equal(record[slots, 1], chosen.to(dtype))
    record[slots, 1] = 77
    assert (record == 77).all()


def test_no_tokens(device):
    from tracefp4.kernels.choice import choose

    gates, chosen = choose(torch.zeros(0, 8, device=device), 2, renormalise=True, dtype=torch.bfloat16)
    assert gates.shape == chosen.shape == (0, 2)
