"""AdamW on masters: equal to torch's in FP32, keeps updates that bfloat16 would lose, refuses what is not finite."""

import pytest
import torch

from tracefp4.config import OptimizerConfig
from tracefp4.errors import CheckpointError, ConfigError, NonFiniteError
from tracefp4.training.optimizer import MasterAdamW


def _pair(dtype):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4, dtype=dtype)
    return layer, MasterAdamW(layer.named_parameters(), OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1e9))


def test_equals_torch_adamw_in_fp32():
    layer, ours = _pair(torch.float32)
    twin = torch.nn.Linear(8, 4)
    twin.load_state_dict(layer.state_dict())
    adam = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        for model in (layer, twin):
            model(x).square().sum().backward()
        ours.step()
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(layer.weight, twin.weight)


def test_small_updates_accumulate_beneath_bfloat16():
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(layer.weight, 1.0)
    optimizer = MasterAdamW(layer.named_parameters(), OptimizerConfig(lr=5e-4))
    for _ in range(20):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    # each update is a quarter of a bfloat16 step below 1; added in place, every one would vanish
    assert layer.weight.item() == pytest.approx(1 - 20 * 5e-4, abs=2**-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_change_nothing(bad):
    layer, optimizer = _pair(torch.bfloat16)
    before = layer.weight.clone()
    layer.weight.grad = torch.full_like(layer.weight, bad)
    with pytest.raises(NonFiniteError, match="not applied"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    assert optimizer.steps == 0 and not optimizer.gradients()


def test_a_step_that_was_left_out_leaves_no_trace():
    (layer, optimizer), (twin, without) = _pair(torch.bfloat16), _pair(torch.bfloat16)
    for value in (0.5, float("nan"), -0.25, 1.0):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, value)
        if value != value:
            with pytest.raises(NonFiniteError):
                optimizer.step()
            continue
        for parameter in twin.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        without.step()
    state, expected = optimizer.state(), without.state()
    assert optimizer.steps == 3 and set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in state)


def test_gradient_norm_is_clipped():
    layer, _ = _pair(torch.float32)
    twin = torch.nn.Linear(8, 4)
    twin.load_state_dict(layer.state_dict())
    optimizer = MasterAdamW(layer.named_parameters(), OptimizerConfig(lr=0.1, max_grad_norm=0.5, weight_decay=0.0))
    adam = torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    for value in (3.0, 1e-3):  # clipped, and not
        for model in (layer, twin):
            model.weight.grad = torch.full_like(model.weight, value)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        adam.step()
        assert optimizer.step() == pytest.approx(value * 32**0.5)
    torch.testing.assert_close(layer.weight, twin.weight)


def test_gradients_of_micro_batches_add_up_in_fp32():
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = MasterAdamW(layer.named_parameters(), OptimizerConfig(max_grad_norm=1e9))
    for value in (1.0, *[2.0**-9] * 256):
        layer.weight.grad = torch.full_like(layer.weight, value)
        optimizer.collect()
        assert layer.weight.grad is None
    # in bfloat16, 1 + 2^-9 is 1, however often it is added
    assert optimizer.gradients()["weight"].item() == 1.5
    assert optimizer.step() == 1.5
    assert not optimizer.gradients()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_of_a_run(schedule, expected):
    layer = torch.nn.Linear(2, 2)
    optimizer = MasterAdamW(layer.named_parameters(), OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule), 6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.learning_rate())
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert rates == pytest.approx(expected, abs=1e-5)
    assert optimizer.learning_rate() == (1.0 if schedule == "constant" else pytest.approx(0.0))


def test_a_falling_rate_needs_an_end():
    with pytest.raises(ConfigError, match="optimizer.schedule = 'linear' needs to know how many optimizer steps"):
        MasterAdamW(torch.nn.Linear(2, 2).named_parameters(), OptimizerConfig(schedule="linear"))


def test_state_restores_exactly_and_refuses_foreign_shapes():
    layer, optimizer = _pair(torch.bfloat16)
    grads = [torch.randn(4, 8, generator=torch.Generator().manual_seed(s)).bfloat16() for s in range(4)]

    def advance(lay, opt, some):
        for g in some:
            lay.weight.grad = g.clone()
            lay.bias.grad = torch.zeros_like(lay.bias)
            opt.step()

    advance(layer, optimizer, grads[:2])
    state = {k: v.clone() for k, v in optimizer.state().items()}
    other, resumed = _pair(torch.bfloat16)
    resumed.load(state, steps=2)
    advance(layer, optimizer, grads[2:])
    advance(other, resumed, grads[2:])
    assert torch.equal(layer.weight, other.weight)
    state["master.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="weight"):
        resumed.load(state, steps=2)
