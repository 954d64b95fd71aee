"""Which norms and rotary functions a trainer takes over, and that it gives them back."""

from __future__ import annotations

import sys

import pytest
import torch

from tracefp4.formats.spec import get_spec
from tracefp4.models import rotary
from tracefp4.models.binding import bind, unbind
from tracefp4.models.layout import describe
from tracefp4.models.norms import is_plain
from tracefp4.models.rotary import FUNCTION
from tracefp4.models.tiny import tiny_model
from tracefp4.training.sites import TrainerSites

PLAIN = {"mixtral": True, "qwen3_moe": True, "olmoe": True, "qwen3_next": False}
"""Families whose layer norms are ``weight * narrow(...)``; the last one multiplies by ``1 + weight`` in float32."""


def _family(model):
    layer = next(m for m in model.modules() if hasattr(m, "q_proj"))
    return sys.modules[type(layer).__module__]


@pytest.mark.parametrize("family", PLAIN)
def test_norms_are_told_by_what_they_compute(family):
    model = tiny_model(family, 0)
    norms = [m for name, m in model.named_modules() if name.endswith("input_layernorm")]
    assert [is_plain(m) for m in norms] == [PLAIN[family]] * len(norms)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_everything_is_given_back(family):
    models = [tiny_model(family, seed) for seed in range(2)]
    before = getattr(_family(models[0]), FUNCTION)  # of another model's that is still bound, perhaps
    for model in models:
        bind(model, TrainerSites(describe(model), get_spec("bf16")))
    fused = [m for m in models[0].modules() if "forward" in vars(m) and hasattr(m, "variance_epsilon")]
    assert bool(fused) == PLAIN[family]
    assert getattr(_family(models[0]), FUNCTION).__module__ == rotary.__name__
    unbind(models[0])
    assert not [m for m in models[0].modules() if "forward" in vars(m)]
    assert getattr(_family(models[0]), FUNCTION).__module__ == rotary.__name__
    unbind(models[1])
    assert getattr(_family(models[0]), FUNCTION) is before


def test_a_norm_with_a_hook_or_of_another_formula_keeps_its_code():
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2e-6))

    assert not is_plain(Shifted())
    norm = tiny_model("mixtral", 0).get_submodule("model.norm")
    assert is_plain(norm)
    norm.register_forward_hook(lambda *_: None)
    assert not is_plain(norm)
