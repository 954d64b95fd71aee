"""The expert linear layer against a plain reference, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.models.dispatch import choose_strategy, dispatch
from tracefp4.models.linear import expert_linear, product
from tracefp4.models.sites import Operand

STRATEGIES = ["loop", "grouped", "dense"]
T, K, E, D, N = 13, 2, 5, 32, 24


def routes(device, seed=0, tokens=T, experts=E, top_k=K):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(device)


def operands(rows, device, dtype, scaled=True, seed=0):
    """Codes times block scales, exact in bfloat16, and global scales that are no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-6, 7, (rows, D), generator=generator).to(device, dtype) / 2
    w = torch.randint(-6, 7, (E, N, D), generator=generator).to(device, dtype) / 4
    x_scale = torch.rand(rows, 1, generator=generator).to(device) + 0.1 if scaled else None
    w_scale = torch.rand(E, generator=generator).to(device) + 0.1 if scaled else None
    return Operand(x, x_scale), Operand(w, w_scale)


def reference(x_op, w_op, bias, plan, per_token):
    """Every pair's product in float64, from dequantized tensors."""
    x, w = x_op.values.double(), w_op.values.double()
    x = x if x_op.scale is None else x * x_op.scale.double()
    w = w if w_op.scale is None else w * w_op.scale.double()[:, None, None]
    rows = x[plan.tokens] if per_token else x
    out = torch.einsum("pd,pnd->pn", rows, w[plan.experts])
    return out if bias is None else out + bias.double()[plan.experts]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_forward(device, strategy, per_token, scaled):
    plan = dispatch(routes(device), E, strategy)
    x_op, w_op = operands(T if per_token else T * K, device, torch.bfloat16, scaled)
    bias = torch.randn(E, N, device=device).bfloat16()
    with torch.no_grad():
        out = expert_linear(x_op.values, w_op.values, x_op, w_op, bias, plan, per_token=per_token)
    exact = reference(x_op, w_op, bias, plan, per_token)
    assert out.dtype is torch.bfloat16
    # One rounding: never further from the exact value than half a unit in the last place, and float32 noise.
    assert ((out.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-5) + 1e-5).all()


def test_strategies_agree(device):
    index = routes(device)
    x_op, w_op = operands(T, device, torch.bfloat16)
    results = []
    for strategy in STRATEGIES:
        plan = dispatch(index, E, strategy)
        with torch.no_grad():
            out = expert_linear(x_op.values, w_op.values, x_op, w_op, None, plan, per_token=True)
        slots = torch.empty_like(out)
        slots[plan.pairs] = out
        results.append(slots)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=0, rtol=2**-7)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_token", [True, False])
def test_backward_is_that_of_the_dequantized_product(strategy, transposed, per_token):
    plan = dispatch(routes("cpu"), E, strategy)
    rows = T if per_token else T * K
    x_op, w_op = operands(rows, "cpu", torch.float64)
    x_op.scale, w_op.scale = x_op.scale.double(), w_op.scale.double()
    x, bias = torch.randn(rows, D, dtype=torch.float64), torch.randn(E, N, dtype=torch.float64)
    weight = torch.randn((E, D, N) if transposed else (E, N, D), dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    out = expert_linear(x, weight, x_op, w_op, bias, plan, per_token=per_token, transposed=transposed)
    seed = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, seed)

    matrix = weight.transpose(1, 2) if transposed else weight
    x_hat = x + (x_op.values * x_op.scale - x).detach()
    w_hat = matrix + (w_op.values * w_op.scale[:, None, None] - matrix).detach()
    picked = x_hat[plan.tokens] if per_token else x_hat
    plain = torch.einsum("pd,pnd->pn", picked, w_hat[plan.experts]) + bias[plan.experts]
    torch.testing.assert_close(out, plain, atol=1e-12, rtol=1e-12)
    for mine, theirs in zip(ours, torch.autograd.grad(plain, leaves, seed), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_in_bfloat16_is_near_the_exact_one(device, strategy):
    plan = dispatch(routes(device), E, strategy)
    x_op, w_op = operands(T, device, torch.bfloat16)
    x = x_op.values.clone().requires_grad_()
    weight = w_op.values.clone().requires_grad_()
    out = expert_linear(x, weight, x_op, w_op, None, plan, per_token=True)
    seed = torch.randn_like(out)
    grad_x, grad_w = torch.autograd.grad(out, (x, weight), seed)
    assert grad_x.dtype is grad_w.dtype is torch.bfloat16

    w_hat = w_op.values.double() * w_op.scale.double()[:, None, None]
    x_hat = (x_op.values.double() * x_op.scale.double())[plan.tokens]
    rows = torch.einsum("pn,pnd->pd", seed.double(), w_hat[plan.experts])
    exact_x = torch.zeros(T, D, dtype=torch.float64, device=device).index_add_(0, plan.tokens, rows)
    exact_w = torch.zeros(E, N, D, dtype=torch.float64, device=device)
    exact_w.index_add_(0, plan.experts, seed.double().unsqueeze(-1) * x_hat.unsqueeze(1))
    for mine, exact in ((grad_x, exact_x), (grad_w, exact_w)):
        assert (mine.double() - exact).norm() < 0.005 * exact.norm()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_without_tokens_get_zero_gradient(strategy):
    plan = dispatch(torch.tensor([[0], [0]]), E, strategy)
    x_op, w_op = operands(2, "cpu", torch.bfloat16)
    x, weight = x_op.values.clone().requires_grad_(), w_op.values.clone().requires_grad_()
    expert_linear(x, weight, x_op, w_op, None, plan, per_token=True).sum().backward()
    assert weight.grad[0].abs().sum() > 0
    assert (weight.grad[1:] == 0).all()


@pytest.mark.parametrize("strategy", ["loop", "grouped"])
@pytest.mark.parametrize(
    "counts",
    [[3, 0, 0, 5, 1], [0, 0, 0, 0, 0], [0, 70, 1, 0, 2], [1, 1, 1, 1, 1] * 8, [0, 0, 9], [200, 1, 1, 1, 1, 200]],
)
def test_groups_hold_every_row_once(strategy, counts):
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))
    plan = dispatch(experts[order].unsqueeze(1), len(counts), strategy)
    seen = []
    for group in plan.groups:
        rows = plan.experts[group.rows]
        places = plan.place[group.rows]
        assert ((rows - group.first) * group.capacity <= places).all()
        assert (places < (rows - group.first + 1) * group.capacity).all()
        assert len(set(places.tolist())) == len(places) > 0
        assert counts[group.first] and counts[group.first + group.size - 1]
        tiles = sum(max(c, 32) for c in counts[group.first : group.first + group.size] if c)
        assert group.size == 1 or group.size * max(group.capacity, 32) <= 2 * tiles
        assert strategy == "grouped" or group.size == 1
        seen += list(range(len(experts)))[group.rows]
    assert seen == list(range(len(experts)))


def test_one_slot_a_token_is_not_mistaken_for_pair_rows():
    index = torch.tensor([[3], [0], [2], [1]])
    plan = dispatch(index, E, "loop")
    x_op, w_op = operands(4, "cpu", torch.bfloat16)
    with torch.no_grad():
        out = expert_linear(x_op.values, w_op.values, x_op, w_op, None, plan, per_token=True)
    expected = reference(x_op, w_op, None, plan, True)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-8)
    assert plan.tokens.tolist() == [1, 3, 2, 0]


def test_saves_no_widened_copy():
    plan = dispatch(routes("cpu"), E, "loop")
    x_op, w_op = operands(T, "cpu", torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        expert_linear(
            x_op.values.clone().requires_grad_(), w_op.values, x_op, w_op, None, plan, per_token=True
        ).float().sum()
    assert sorted(t.data_ptr() for t in saved) == sorted(
        t.data_ptr() for t in (x_op.values, x_op.scale, w_op.values, w_op.scale)
    )


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_rows_do_not_depend_on_their_order(device, tokens):
    index = routes(device, tokens=tokens)
    generator = torch.Generator().manual_seed(2)
    x_op, w_op = operands(tokens, device, torch.bfloat16)
    order = torch.randperm(tokens, generator=generator).to(device)

    def run(rows):
        plan = dispatch(index[rows], E, "loop")
        op = Operand(x_op.values[rows], x_op.scale[rows])
        with torch.no_grad():
            out = expert_linear(op.values, w_op.values, op, w_op, None, plan, per_token=True)
        slots = torch.empty_like(out)
        slots[plan.pairs] = out
        return slots.view(tokens, K, N)

    first, second = run(torch.arange(tokens, device=device)), run(order)
    torch.testing.assert_close(second, first[order], atol=0, rtol=2**-7)


def test_wide_product_does_not_round_to_the_operand_dtype(device):
    a = torch.full((16, 64), 1.0078125, device=device, dtype=torch.bfloat16)
    result = product(a, a.t())
    assert result.dtype is torch.float32
    assert torch.equal(result, torch.full_like(result, 64 * 1.0078125**2))


def test_widened_weights_give_the_same(device):
    plan = dispatch(routes(device), E, "loop")
    x_op, w_op = operands(T, device, torch.bfloat16)
    with torch.no_grad():
        narrow = expert_linear(x_op.values, w_op.values, x_op, w_op, None, plan, per_token=True)
        wide = Operand(w_op.values.float(), w_op.scale)
        out = expert_linear(x_op.values, w_op.values, x_op, wide, None, plan, per_token=True)
    torch.testing.assert_close(out, narrow, atol=0, rtol=2**-7 if device.type == "cuda" else 0)


def test_no_tokens():
    plan = dispatch(torch.zeros(0, K, dtype=torch.long), E, "loop")
    x_op, w_op = operands(0, "cpu", torch.bfloat16)
    x = x_op.values.clone().requires_grad_()
    out = expert_linear(x, w_op.values, x_op, w_op, None, plan, per_token=True)
    assert out.shape == (0, N)
    out.sum().backward()
    assert x.grad.shape == (0, D)


def test_errors():
    plan = dispatch(routes("cpu"), E, "dense")
    x_op, w_op = operands(T, "cpu", torch.bfloat16)
    with pytest.raises(ModelError, match="does not fit"):
        expert_linear(x_op.values, w_op.values[:, :, :-1], x_op, w_op, None, plan, per_token=True)
    with pytest.raises(ModelError, match="expected"):
        expert_linear(x_op.values, w_op.values, x_op, w_op, None, plan, per_token=False)
    with pytest.raises(ModelError, match=r"0\.\.4"):
        dispatch(torch.tensor([[0, 5]]), E, "loop")
    with pytest.raises(ModelError, match="unknown expert strategy"):
        dispatch(routes("cpu"), E, "fast")


def test_choice_on_the_cpu():
    cpu = torch.device("cpu")
    assert choose_strategy(1, 8, cpu, training=False) == "loop"
    assert choose_strategy(1, 8, cpu, training=True) == "loop"


@pytest.mark.gpu
def test_choice_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda = torch.device("cuda")
    assert choose_strategy(8, 128, cuda, training=False) == "dense"
    assert choose_strategy(8, 128, cuda, training=True) == "grouped"
    assert choose_strategy(8192, 128, cuda, training=False) == "grouped"
