"""A bound model inside FSDP2 and torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tracefp4.formats.spec import get_spec
from tracefp4.models.binding import bind
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model

SPEC = "nvfp4-w4a4-kv4"


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def backward(model, tokens):
    model(tokens, use_cache=False).logits.float().square().mean().backward()


def shard(model, layout, mesh):
    for name in layout.routers.values():
        # Some families keep the router in float32, and one FSDP group has one dtype.
        fully_shard(model.get_submodule(name), mesh=mesh)
    for layer in model.get_submodule(layout.decoder).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("bind_first", [True, False])
def test_fsdp_gives_the_same_gradients(sites_of, tokens, mesh, family, bind_first):
    plain = tiny_model(family)
    layout = describe(plain)
    bind(plain, sites_of(layout, get_spec(SPEC)))
    backward(plain, tokens)

    model, sites = tiny_model(family), sites_of(layout, get_spec(SPEC))
    if bind_first:
        bind(model, sites)
    shard(model, layout, mesh)
    if not bind_first:
        bind(model, sites)
    assert describe(model) == layout
    backward(model, tokens)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad), name

    with torch.no_grad():
        sites.replayed = dict(sites.routes)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_compiled_layers_without_graph_breaks(sites_of, tokens, family):
    """The dense strategy leaves nothing for the host to decide; checked with the tracer alone, no code generated."""
    model = tiny_model(family)
    sites = sites_of(describe(model), get_spec(SPEC))
    sites.strategy = "dense"
    sites.router = lambda layer: Keep()
    bind(model, sites)
    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
        assert torch.equal(model(tokens, use_cache=False).logits, plain)


class Keep:
    def route(self, indices):
        return None
