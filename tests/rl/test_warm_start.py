"""The warm start: the same start everywhere, made once, and named by everything that shapes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tracefp4.config import OptimizerConfig, WarmStartConfig
from tracefp4.errors import CheckpointError
from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bound
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.rl import warm_start as module
from tracefp4.rl.warm_start import LoadBalance, WarmStart, warm_start
from tracefp4.training.batch import Example
from tracefp4.training.graphs import DecoderGraphs
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.sites import TrainerSites

CONFIG = WarmStartConfig(steps=3, batch_size=4, lr=1e-3, router_aux=0.1)

QUANTIZED = CONFIG.model_copy(update={"spec": "nvfp4-w4a4-kv4"})


def _pairs(step: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    draw = torch.Generator().manual_seed(step)
    return [
        (
            tuple(torch.randint(3, 200, (2 + i,), generator=draw).tolist()),
            tuple(torch.randint(3, 200, (3,), generator=draw).tolist()),
        )
        for i in range(4)
    ]


def _whole(model: nn.Module, cache: Path, config: WarmStartConfig = CONFIG, **changes: Any) -> WarmStart:
    arguments: dict[str, Any] = {"identity": {"seed": 0}, "cache": cache, "micro_tokens": 16} | changes
    return warm_start(model, config, _pairs, **arguments)


def _start(model: nn.Module, cache: Path, config: WarmStartConfig = CONFIG, **changes: Any) -> str:
    return _whole(model, cache, config, **changes).name


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_two_starts_are_bit_for_bit_equal_and_differ_from_the_model(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    losses: list[float] = []
    name = _start(first, tmp_path / "a", progress=lambda _, loss: losses.append(loss))
    assert name == _start(second, tmp_path / "b")
    assert _equal(first, second)
    assert not _equal(first, model)
    assert len(losses) == 3 and all(loss > 0 for loss in losses)
    assert all(p.grad is None for p in first.parameters())


def test_the_second_call_loads_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    name = _start(first, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(module, "_fine_tune", never)
    assert _start(second, tmp_path, progress=lambda *_: never()) == name
    assert _equal(first, second)


def test_a_cached_start_of_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    _start(copy.deepcopy(model), tmp_path / "a")
    other = tiny_model("qwen3_moe", num_hidden_layers=1)
    _start(copy.deepcopy(other), tmp_path)
    (mine,), (others,) = (folder.glob("*.safetensors") for folder in (tmp_path / "a", tmp_path))
    mine.replace(others)
    with pytest.raises(CheckpointError, match="another model"):
        _start(other, tmp_path)


def test_the_hash_names_everything_that_shapes_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_fine_tune", lambda *_: None)
    model = tiny_model("qwen3_moe")
    names = [_start(model, tmp_path)]
    changes = {"steps": 4, "batch_size": 5, "lr": 2e-3, "router_aux": 0.0, "weight_decay": 0.1, "spec": "nvfp4-w4a4"}
    for key, value in changes.items():
        names.append(_start(model, tmp_path, CONFIG.model_copy(update={key: value})))
    assert {*CONFIG.model_dump()} == {*changes}
    names.append(_start(model, tmp_path, QUANTIZED, numerics="nvfp4-pow2"))
    names.append(_start(model, tmp_path, QUANTIZED))
    names.append(_start(model, tmp_path, identity={"seed": 1}))
    names.append(_start(model, tmp_path, micro_tokens=32))
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    names.append(_start(model, tmp_path))
    names.append(_start(model, tmp_path, CONFIG.model_copy(update={"steps": 0})))
    assert len(set(names)) == len(names)


def test_starts_of_equal_settings_and_unequal_weights_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from two kinds of GPU, or where the capture of a graph failed: what comes of it is part of the name."""
    first = _whole(tiny_model("qwen3_moe"), tmp_path / "a")
    fine_tune = module._fine_tune

    def elsewhere(model: nn.Module, *rest: Any) -> None:
        fine_tune(model, *rest)
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if name.endswith("down_proj")).view(-1)[0] += 1

    monkeypatch.setattr(module, "_fine_tune", elsewhere)
    second = _whole(tiny_model("qwen3_moe"), tmp_path / "b")
    assert first.inputs == second.inputs and first.name != second.name
    assert _start(tiny_model("qwen3_moe"), tmp_path / "b") == second.name, "a cached start has the name of its weights"


def test_a_start_is_made_anew_with_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _whole(tiny_model("qwen3_moe"), tmp_path)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert _whole(tiny_model("qwen3_moe"), tmp_path).inputs == first.inputs
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_run_that_goes_on_keeps_the_name_of_its_start() -> None:
    here = WarmStart("a-b", "a", 1.0)
    assert here.of("a-c", needed=False).name == "a-c"
    assert here.of("", needed=True).name == here.of("a-b", needed=True).name == "a-b"
    with pytest.raises(CheckpointError, match="began from warm start a-c"):
        here.of("a-c", needed=True)


def test_no_steps_change_nothing(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    before = copy.deepcopy(model)
    _start(model, tmp_path, CONFIG.model_copy(update={"steps": 0}))
    assert _equal(model, before)
    assert not list(tmp_path.iterdir())


def test_numerics_say_nothing_of_a_start_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    none = CONFIG.model_copy(update={"steps": 0})
    assert _start(model, tmp_path, none, numerics="nvfp4-pow2") == _start(model, tmp_path, none)


def test_a_quantized_start_is_another_one_and_costs_fp4_less(tmp_path: Path) -> None:
    """Measured with the loss that the FP4 policy has on what both were fine-tuned on."""
    plain, quantized = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    pairs = _pairs(0)

    def train(model: nn.Module, spec: str, steps: int, lr: float) -> list[float]:
        losses: list[float] = []
        config = WarmStartConfig(steps=steps, batch_size=4, lr=lr, spec=spec)
        warm_start(
            model,
            config,
            lambda _: pairs,
            identity={"steps": steps},
            cache=tmp_path / f"{spec}-{len(list(tmp_path.iterdir()))}",
            micro_tokens=16,
            progress=lambda _, loss: losses.append(loss),
        )
        return losses

    train(plain, "bf16", 40, 3e-3)
    train(quantized, "nvfp4-w4a4-kv4", 40, 3e-3)
    assert not _equal(plain, quantized)
    # The first loss of one more step under FP4 is that of the weights as they are.
    after = {name: train(m, "nvfp4-w4a4-kv4", 1, 1e-9)[0] for name, m in [("plain", plain), ("quantized", quantized)]}
    assert after["quantized"] < after["plain"]


def test_it_learns(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    losses: list[float] = []
    pairs = _pairs(0)
    warm_start(
        model,
        WarmStartConfig(steps=12, batch_size=4, lr=3e-3),
        lambda _: pairs,
        identity={},
        cache=tmp_path,
        micro_tokens=64,
        progress=lambda _, loss: losses.append(loss),
    )
    assert losses[-1] < 0.5 * losses[0]


# Load balance ---------------------------------------------------------------------------------------------------------


class _Router(nn.Module):
    """Returns what it is given, as a router does: logits, weights, indices."""

    def forward(self, logits: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return logits, logits, indices


def _loss(cases: list[tuple[torch.Tensor, torch.Tensor]], real: torch.Tensor, experts: int) -> float:
    model = nn.ModuleDict({"router": _Router()})
    balance = LoadBalance(model, ["router"], experts)
    balance.start()
    for logits, indices in cases:
        model["router"](logits, indices)
    out = float(balance.take(real))
    balance.close()
    return out


def test_a_balanced_router_has_loss_one() -> None:
    # 4 tokens, 4 experts, top-2: every expert is chosen twice, all are equally likely.
    indices = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    assert _loss([(torch.zeros(4, 4), indices)], torch.ones(1, 4, dtype=torch.bool), 4) == pytest.approx(1.0)


def test_a_collapsed_router_has_a_loss_of_the_number_of_experts_over_top_k() -> None:
    # All mass on experts 0 and 1, which are always chosen: 4 * (1/2 * 1/2 + 1/2 * 1/2) = 2.
    logits = torch.tensor([[0.0, 0.0, -1e4, -1e4]]).expand(6, 4)
    indices = torch.tensor([[0, 1]]).expand(6, 2)
    assert _loss([(logits, indices)], torch.ones(2, 3, dtype=torch.bool), 4) == pytest.approx(2.0)


def test_a_hand_computed_mixture() -> None:
    # Shares (3/4, 1/4), mean probabilities (0.65, 0.35): 2 * (0.75 * 0.65 + 0.25 * 0.35) = 1.15.
    chances = torch.tensor([0.9, 0.8, 0.7, 0.2])
    logits = torch.stack([chances, 1 - chances], dim=-1).log()
    indices = torch.tensor([[0], [0], [0], [1]])
    assert _loss([(logits, indices)], torch.ones(1, 4, dtype=torch.bool), 2) == pytest.approx(1.15)


def test_padding_does_not_count_and_routers_are_averaged() -> None:
    balanced = (torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 0], [0, 0]]))
    collapsed = (
        torch.tensor([[0.0, 0.0, -1e4, -1e4]] * 2 + [[0.0] * 4] * 2),
        torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3]]),
    )
    real = torch.tensor([[True, True], [False, False]])
    assert _loss([balanced], real, 4) == pytest.approx(1.0)
    assert _loss([balanced, collapsed], real, 4) == pytest.approx(1.5)


@pytest.mark.parametrize("router_aux", [0.0, 20.0])
def test_gradients_of_a_captured_start(router_aux: float, rerun: Any) -> None:
    """With and without a router loss, which comes out of the graph as well."""
    model = tiny_model("qwen3_moe")
    layout = describe(model)
    sites = TrainerSites(layout, get_spec("bf16"))
    balance = LoadBalance(model, layout.routers.values(), layout.num_experts) if router_aux else None
    examples = [Example(prompt + completion, len(prompt), index=i) for i, (prompt, completion) in enumerate(_pairs(0))]
    found = []
    with bound(model, sites):
        for graphs in (None, *2 * (DecoderGraphs(model, sites, 128, rerun, balance),)):
            optimizer = MasterAdamW(model.named_parameters(), OptimizerConfig())
            tuning = module._FineTuning(model, sites, optimizer, 128, router_aux, balance, graphs)
            loss = tuning.backward(examples)
            assert graphs is None or (graphs.beside is None) == (balance is None)
            found.append((loss, optimizer.gradients()))
    (loss, gradients), *others = found
    routers = {f"{name}.weight" for name in layout.routers.values()}
    assert routers <= gradients.keys()
    for other, theirs in others:
        assert other == pytest.approx(loss, abs=1e-2)
        assert theirs.keys() == gradients.keys()
        for name, grad in gradients.items():
            assert (theirs[name] - grad).norm() <= 3e-2 * grad.norm() + 1e-5, name
