"""Gate values of given routes and their gradient, against PyTorch in float64; and a router that knows its routes."""

from __future__ import annotations

import pytest
import torch

from tracefp4.formats.spec import get_spec
from tracefp4.kernels.gate_values import gate_values, gate_values_backward
from tracefp4.models.binding import bound
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.training.batch import Example, collate
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("tokens,experts,top_k", [(1, 4, 2), (37, 8, 2), (300, 6, 3), (5, 128, 8)])
def test_values_and_gradient(tokens, experts, top_k, renormalised, device):
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(tokens, experts, generator=generator) * 3
    index = torch.rand(tokens, experts, generator=generator).topk(top_k, -1)[1]
    grad = torch.randn(tokens, top_k, generator=generator)
    leaf = logits.double().requires_grad_()
    expected = torch.softmax(leaf, -1).gather(-1, index)
    expected = expected / expected.sum(-1, keepdim=True) if renormalised else expected
    expected.backward(grad.double())
    here = logits.to(device), index.to(device)
    found = gate_values(*here, renormalised=renormalised, dtype=torch.float32)
    torch.testing.assert_close(found.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-7)
    back = gate_values_backward(grad.to(device), *here, renormalised=renormalised)
    torch.testing.assert_close(back.cpu().double(), leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_router_that_knows_its_routes_learns_the_same(family, missing, device, monkeypatch):
    found = {}
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("TRACEFP4_KERNELS", kernels)
        model = tiny_model(family, 0, device=device, num_hidden_layers=1)
        layout = describe(model)
        routes = torch.rand(10, 1, layout.num_experts, generator=torch.Generator().manual_seed(2)).topk(2, -1)[1]
        routes[4] = -1 if missing else routes[4]
        tokens = torch.randint(3, 200, (11,), generator=torch.Generator().manual_seed(3)).tolist()
        batch = collate([Example(tuple(tokens), 5, routes=routes)], device)
        sites = TrainerSites(layout, get_spec("bf16"))
        model.train()
        router = model.get_submodule(layout.routers[0])
        with bound(model, sites), sites.batch(batch):
            token_logprobs(model, batch)[0].sum().backward()
            _, gates, index = router(torch.randn(10, layout.hidden, device=device).bfloat16() * 0 + 0.25)
        assert index.shape == gates.shape == (10, 2)
        assert missing or torch.equal(index.cpu(), routes[:, 0])
        found[kernels] = router.weight.grad.float().cpu(), gates.float().detach().cpu()
    torch.testing.assert_close(found["triton"][1], found["reference"][1], rtol=0.01, atol=0)
    gap = torch.linalg.vector_norm(found["triton"][0] - found["reference"][0])
    assert gap <= 0.05 * torch.linalg.vector_norm(found["reference"][0])
