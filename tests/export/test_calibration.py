"""Input energies against hooks on a plain forward pass."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.export.calibration import calibrate
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model


def sequences(count=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 256, (6 + 5 * i,), generator=g).tolist()) for i in range(count)]


def expected(model, tokens):
    """Sums of squares of the experts' inputs, one sequence at a time, from the module's own eager implementation."""
    layout, found, counts = describe(model), {}, {}

    def hook(name):
        def see(module, args):
            hidden, index, _ = args
            for t in range(hidden.shape[0]):
                for e in index[t].tolist():
                    key = (f"{name}.gate_up_proj", e)
                    x = hidden[t].double()
                    found[key] = found.get(key, 0) + x.square()
                    counts[name, e] = counts.get((name, e), 0) + 1
                    gate_up = torch.nn.functional.linear(hidden[t : t + 1], module.gate_up_proj[e])
                    h = module._apply_gate(gate_up)[0].double()
                    key = (f"{name}.down_proj", e)
                    found[key] = found.get(key, 0) + h.square()

        return see

    hooks = [model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in layout.experts.values()]
    with torch.no_grad():
        for row in tokens:
            model(torch.tensor([row[:-1]]), use_cache=False)
    for one in hooks:
        one.remove()
    return found, counts


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_energies_are_those_of_the_plain_model(family):
    model, tokens = tiny_model(family, dtype=torch.float32), sequences()
    sums, counts = expected(model, tokens)
    # 40 rows at once: several sequences of different length share a batch, so that padding has to be left out.
    found = calibrate(model, tokens, micro_tokens=40)
    assert found.tokens == sum(len(s) - 1 for s in tokens)
    layout = describe(model)
    for name in layout.experts.values():
        for projection in ("gate_up_proj", "down_proj"):
            for e in range(layout.num_experts):
                if (name, e) in counts:
                    mean = sums[f"{name}.{projection}", e] / counts[name, e]
                    torch.testing.assert_close(
                        found.energy[f"{name}.{projection}"][e].double(), mean, rtol=1e-3, atol=1e-4
                    )


def test_experts_without_tokens_take_the_mean_and_are_counted():
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    found = calibrate(model, [(1, 2)])  # one token, two of eight experts a layer
    assert found.unreached == 2 * 6
    for name, energy in found.energy.items():
        # Both experts saw the same input; their intermediates differ, and the others have the mean of the two.
        assert len(torch.unique(energy, dim=0)) == (1 if name.endswith("gate_up_proj") else 3)
        assert (energy >= 0).all()


def test_refusals():
    with pytest.raises(ModelError, match="at least one sequence"):
        calibrate(tiny_model("qwen3_moe"), [])
