"""Expert products of a training step, forward and backward, against float64 and against the plain path."""

from __future__ import annotations

import pytest
import torch

from tracefp4.formats.spec import get_spec
from tracefp4.kernels.experts_training import (
    ROWS,
    Tile,
    combine_backward,
    pair_product,
    slot_sum,
    weight_product,
)
from tracefp4.kernels.routing import route, route_layers
from tracefp4.models.binding import bind
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.training.batch import Example, collate
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites

TILES = [Tile(64, 32, 4, 2), Tile()]


def _case(tokens, experts, top_k, out, width, device, unused=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts - unused, generator=generator).topk(top_k, -1)[1]
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    w = torch.randn(experts, out, width, generator=generator).bfloat16()
    return index.to(device), x.to(device), w.to(device)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(
    "tokens,experts,top_k,out,width", [(150, 3, 2, 96, 64), (1, 4, 2, 48, 80), (37, 8, 3, 130, 48)]
)
def test_products_of_pairs(tokens, experts, top_k, out, width, per_token, tile, device):
    index, x, w = _case(tokens, experts, top_k, out, width, device, unused=1)
    pairs = route(index, experts, ROWS)
    chosen = index.reshape(-1)
    rows = x.repeat_interleave(top_k, 0)
    x_in = x if per_token else rows.contiguous()
    scale = torch.rand(len(x_in), 1, device=device) + 0.5
    alpha = torch.rand(experts, device=device) + 0.5
    found = pair_product(x_in, scale, w, alpha, pairs, per_token=per_token, dtype=torch.float32, tile=tile)
    exact = torch.einsum("pd,pnd->pn", rows.double(), w[chosen].double())
    factor = (scale.repeat_interleave(top_k, 0) if per_token else scale) * alpha[chosen, None]
    torch.testing.assert_close(found.double(), exact * factor.double(), rtol=1e-4, atol=1e-3)
    grad = torch.randn(len(chosen), out, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    back = pair_product(grad, None, w.transpose(1, 2), alpha, pairs, per_token=False, dtype=torch.float32, tile=tile)
    exact = torch.einsum("pn,pnd->pd", grad.double(), w[chosen].double()) * alpha[chosen, None].double()
    torch.testing.assert_close(back.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_token", [True, False])
def test_products_of_weights(per_token, transposed, tile, device):
    tokens, experts, top_k, out, width = 150, 4, 2, 140, 48
    index, x, _ = _case(tokens, experts, top_k, out, width, device, unused=1)
    pairs, starts = route_layers(index[None], experts, ROWS)[0]
    chosen, rows = index.reshape(-1), x.repeat_interleave(top_k, 0)
    grad = torch.randn(len(chosen), out, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    shape = (experts, width, out) if transposed else (experts, out, width)
    found = torch.full(shape, float("nan"), device=device)
    target = found.transpose(1, 2) if transposed else found
    weight_product(grad, x if per_token else rows.contiguous(), pairs, starts, target, per_token=per_token, tile=tile)
    exact = torch.zeros(experts, out, width, dtype=torch.float64, device=device)
    exact.index_add_(0, chosen, grad.double()[:, :, None] * rows.double()[:, None, :])
    torch.testing.assert_close(target.double(), exact, rtol=1e-4, atol=1e-3)
    assert (exact == 0).flatten(1).all(1).any(), "one expert must not be hit"


def test_combine_and_slot_sum(device):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(21, 1100, generator=generator).bfloat16().to(device)
    weights = torch.rand(7, 3, generator=generator).to(device)
    grad = torch.randn(7, 1100, generator=generator).bfloat16().to(device)
    grad_rows, grad_weights = combine_backward(grad, rows, weights)
    wide = grad.float().repeat_interleave(3, 0)
    assert torch.equal(grad_rows, (wide * weights.reshape(-1, 1)).bfloat16())
    torch.testing.assert_close(grad_weights.reshape(-1), (wide * rows.float()).sum(-1), rtol=1e-5, atol=1e-3)
    total = rows.float().view(7, 3, 1100)
    assert torch.equal(slot_sum(rows, 7), (total[:, 0] + total[:, 1] + total[:, 2]).bfloat16())


@pytest.mark.parametrize(
    "family,spec", [pytest.param("qwen3_moe", "nvfp4-w4a4", marks=pytest.mark.slow), ("mixtral", "bf16")]
)
def test_a_model_trains_by_them_as_by_the_plain_path(family, spec, device, monkeypatch):
    found = {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("TRACEFP4_KERNELS", kernels)
        # Small, because an interpreter quantizes a row of a weight at a time.
        experts = {"num_experts": 3, "moe_intermediate_size": 32} if family == "qwen3_moe" else {}
        model = tiny_model(family, 0, device=device, num_hidden_layers=1, **experts)
        sites = TrainerSites(describe(model), get_spec(spec))
        bind(model, sites)
        model.train()
        tokens = torch.randint(3, 200, (11,), generator=torch.Generator().manual_seed(3)).tolist()
        batch = collate([Example(tuple(tokens), 5)], device)
        with sites.batch(batch):
            logprobs = token_logprobs(model, batch)[0]
            logprobs.sum().backward()
        grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        found[kernels] = logprobs.detach(), grads
    plain, fast = found["reference"], found["triton"]
    torch.testing.assert_close(fast[0], plain[0], rtol=0, atol=0.05)
    assert plain[1].keys() == fast[1].keys()
    for name, grad in plain[1].items():
        assert torch.linalg.vector_norm(fast[1][name] - grad) <= 0.03 * torch.linalg.vector_norm(grad), name
