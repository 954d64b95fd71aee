"""Site objects for tests, and models to bind them to."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from tracefp4.core import Kind
from tracefp4.formats.blocks import quantize_weight
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.models.attention import dense_attention
from tracefp4.models.latent import join_rope, rope_part
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.sites import Operand
from tracefp4.models.tiny import tiny_model
from tracefp4.quantizers.nearest import quantize_nearest

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


class Sites:
    """Fake-quantizes to nearest what a spec names; the spec ``bf16`` leaves everything as it is."""

    def __init__(self, layout: ModelLayout, spec: Spec | None = None) -> None:
        self.layout, self.spec = layout, spec or get_spec("bf16")
        self.routes: dict[int, Tensor] = {}
        self.replayed: dict[int, Tensor] = {}
        self.strategy = "auto"

    def experts(self, layer: int) -> ExpertsSite:
        return ExpertsSite(self)

    def router(self, layer: int) -> RouterSite:
        return RouterSite(self, layer)

    def attention(self, layer: int) -> AttentionSite:
        return AttentionSite(self)


class ExpertsSite:
    def __init__(self, owner: Sites) -> None:
        self.owner = owner
        self.pairs: list[Tensor] = []

    @property
    def strategy(self) -> str:
        return self.owner.strategy

    def gate_up(self, module: nn.Module) -> Operand:
        return self._weight(module, module.gate_up_proj)

    def down(self, module: nn.Module) -> Operand:
        return self._weight(module, module.down_proj)

    def enter(self, x: Tensor) -> Operand:
        return self._rows(x)

    def middle(self, h: Tensor, pairs: Tensor) -> Operand:
        self.pairs.append(pairs)
        return self._rows(h)

    def _weight(self, module: nn.Module, weight: Tensor) -> Operand:
        weight = weight.detach()
        matrix = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
        if self.owner.spec.weights is None:
            return Operand(matrix, None)
        q = quantize_weight(matrix, self.owner.spec.weights)
        scale = q.decode_scale()
        return Operand(q.operand(), None if scale is None else scale.reshape(-1))

    def _rows(self, x: Tensor) -> Operand:
        if self.owner.spec.activations is None:
            return Operand(x.detach(), None)
        q = quantize_nearest(x.detach(), self.owner.spec.activations)
        return Operand(q.operand(), q.decode_scale())


class RouterSite:
    def __init__(self, owner: Sites, layer: int) -> None:
        self.owner, self.layer = owner, layer

    def route(self, indices: Tensor) -> Tensor | None:
        self.owner.routes[self.layer] = indices.detach().clone()
        return self.owner.replayed.get(self.layer)


class AttentionSite:
    def __init__(self, owner: Sites) -> None:
        self.owner = owner

    def latent(self, x: Tensor) -> Tensor:
        return self._fake(Kind.LATENT, x)

    def attend(self, module, q, k, v, *, scaling, window, sinks):
        if self.owner.layout.latent_rank is None:
            k, v = self._fake(Kind.K, k), self._fake(Kind.V, v)
        else:
            k = join_rope(k[..., : module.qk_nope_head_dim], self._fake(Kind.K, rope_part(module, k)))
        return dense_attention(q, k, v, scaling=scaling, window=window, sinks=sinks)

    def _fake(self, kind: Kind, x: Tensor) -> Tensor:
        numerics = self.owner.spec.for_kind(kind)
        if numerics is None:
            return x
        return x + (quantize_nearest(x.detach(), numerics).dequantize(x.dtype) - x).detach()


@pytest.fixture
def make():
    """Return ``(model, sites, layout)`` for a family, a spec name and a dtype; unbound, running transformers' code."""

    def build(family: str, spec: str = "bf16", dtype: torch.dtype = torch.float32, **overrides: object):
        model = tiny_model(family, dtype=dtype, **overrides)
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        layout = describe(model)
        return model, Sites(layout, get_spec(spec)), layout

    return build


@pytest.fixture
def sites_of():
    """Return the class of the test sites: ``sites_of(layout, spec)``."""
    return Sites


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
