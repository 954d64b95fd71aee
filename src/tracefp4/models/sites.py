"""What happens at a quantized tensor: the interface between a model and the two sides.

A transformers model reaches us at three seams: its experts function, its attention function and its routers. At each
seam we hand the tensor to a *site object* that was bound to the module. The rollout engine binds objects that quantize
to nearest, record, and keep K and V in a paged pool; the trainer binds objects that fake-quantize, guided or not.
Neither knows the other. There is no global mode and no order of calls: with gradient checkpointing a layer runs twice,
the second time in reverse order, and still finds its own object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from tracefp4.formats.packed import Packed


@dataclass(slots=True)
class Operand:
    """A quantized tensor as a matrix multiplication takes it.

    ``values`` are ``code x block scale`` in bfloat16, which is exact for every FP4 format (or the plain bfloat16 tensor
    where a site is not quantized); ``scale`` is the FP32 global decode scale of each row, which never enters the
    operand and is applied to the FP32 product. ``None`` stands for 1.
    """

    values: Tensor
    """``(rows, width)`` bfloat16 for activations; ``(experts, out, in)`` bfloat16 for weights."""
    scale: Tensor | None
    """``(rows, 1)`` float32 for activations; ``(experts,)`` float32 for weights."""
    packed: Packed | None = None
    """The codes that ``values`` were widened from, where a backward pass had better keep those."""
    second: Tensor | None = None
    """Another term like ``values``, of the same scale, whose product is added; without a gradient."""

    def whole(self) -> Tensor:
        """Both terms as one tensor: ``values``, or the float32 sum, which bfloat16 would not hold."""
        return self.values if self.second is None else self.values.float() + self.second.float()


class ExpertsSite(Protocol):
    """What the experts function of one MoE layer asks for."""

    def gate_up(self, module: nn.Module) -> Operand:
        """Weight operand ``(E, 2I, H)`` of the fused gate and up projections, contraction axis last (gpt-oss too)."""
        ...

    def down(self, module: nn.Module) -> Operand:
        """Weight operand ``(E, H, I)`` of the down projection."""
        ...

    def enter(self, x: Tensor) -> Operand:
        """Quantize ``x (T, H)``, the input of gate_up, one row a token."""
        ...

    def middle(self, h: Tensor, pairs: Tensor) -> Operand:
        """Quantize ``h (P, I)``, the input of down; ``pairs (P,)`` int64 gives each row's ``token * top_k + slot``."""
        ...


class RouterSite(Protocol):
    """What a router hook asks for."""

    def route(self, indices: Tensor) -> Tensor | None:
        """Given the router's own top-k ``indices (T, K)``, return the indices to use, or ``None`` to keep them.

        The rollout records ``indices`` and returns ``None``. The trainer returns the rollout's; gate values are then
        recomputed from the live logits at those indices, so the router still learns. A row of ``-1`` keeps the own
        ones.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """How a plain router chooses: the ``top_k`` largest of a float32 softmax, likeliest first."""

    top_k: int
    renormalise: bool
    """Gate values are divided by their sum."""
    dtype: torch.dtype
    """Of the gate values."""


@runtime_checkable
class ChoosingSite(Protocol):
    """A :class:`RouterSite` that can choose by itself where the router is plain, in place of the module's own code."""

    def choose(self, logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """For ``logits (T, E)`` return gate values ``(T, K)`` and experts ``(T, K)`` int64; ``route`` is not asked."""
        ...


class AttentionSite(Protocol):
    """What the attention function of one layer with a KV cache asks for."""

    def latent(self, x: Tensor) -> Tensor:
        """Quantize the normalised KV latent ``(B, S, r)`` of latent attention; called before :meth:`attend`."""
        ...

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Causal attention over quantized K and V.

        Args:
            module: the attention module.
            q: ``(B, Hq, S, D)`` queries after RoPE.
            k: ``(B, Hkv, S, D)`` keys after RoPE of the *current* tokens only.
            v: ``(B, Hkv, S, Dv)`` values of the current tokens.
            scaling: factor on the logits.
            window: sliding window in tokens, counting the current one; ``None`` for full attention.
            sinks: ``(Hq,)`` attention-sink logits (gpt-oss) or ``None``.

        Returns:
            ``(B, S, Hq, Dv)`` in the dtype of ``q``.
        """
        ...


class Heads(NamedTuple):
    """What an attention module does between its projections and its attention (:mod:`tracefp4.models.heads`)."""

    queries: int
    """Heads of queries."""
    keys: int
    """Heads of keys, and of values."""
    width: int
    """Values of a head."""
    turned: int
    """How many of them, the first ones, the rotary embedding turns."""
    gated: bool
    """Each head of queries is projected with a gate beside it, by whose sigmoid its result is multiplied."""
    eps: float | None
    """Of the norms of queries and keys, ``q_norm`` and ``k_norm``; ``None`` without norms."""
    added: bool
    """See :class:`tracefp4.models.norms.Form`."""
    scaling: float
    window: int | None


@runtime_checkable
class ProjectingSite(Protocol):
    """An :class:`AttentionSite` that can begin at the projections. A trainer has none of it."""

    def takes_heads(self) -> bool:
        """Whether there are kernels for it; otherwise an uncompiled module keeps its own forward."""
        ...

    def attend_heads(
        self, module: nn.Module, heads: Heads, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor | None:
        """Norms, rotary embedding and attention of projected rows.

        Args:
            module: the attention module.
            heads: what it does.
            q: ``(B, S, Hq, D)`` as it was projected, without gates; the last axis dense.
            k: ``(B, S, Hk, D)`` likewise.
            v: ``(B, S, Hk, D)`` likewise.
            cos: ``(B or 1, S, R)``.
            sin: likewise.

        Returns:
            ``(B, S, Hq, D)``; ``None`` where there is no kernel for it, and nothing was stored.
        """
        ...


class DeltaSite(Protocol):
    """What the forward of a gated delta net asks for."""

    @property
    def steps(self) -> bool:
        """Whether the forward in flight is one token of each sequence and this object has their states."""
        ...

    def step(self, module: nn.Module, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Convolution and delta rule; ``mixed (B, C)``, ``a (B, Hv)``, ``b (B, Hv)`` to ``(B, Hv, Dv)``.

        Arguments are those of :mod:`tracefp4.models.recurrence`; weights are the module's.
        """
        ...


E = TypeVar("E", bound=ExpertsSite)
R = TypeVar("R", bound=RouterSite)
A = TypeVar("A", bound=AttentionSite)


class SiteSet(Protocol):
    """All site objects of one side, by decoder layer index."""

    def experts(self, layer: int) -> ExpertsSite:
        """Object of the MoE block in ``layer``."""
        ...

    def router(self, layer: int) -> RouterSite:
        """Object of the router in ``layer``."""
        ...

    def attention(self, layer: int) -> AttentionSite:
        """Object of the attention in ``layer``."""
        ...


@runtime_checkable
class SteppingSites(SiteSet, Protocol):
    """Site objects of an engine that steps gated delta nets by itself; a trainer has none of it."""

    def delta(self, layer: int) -> DeltaSite:
        """Object of the gated delta net in ``layer``."""
        ...


class LayerSites(Generic[E, R, A]):
    """A :class:`SiteSet` that keeps its objects by layer; both sides derive theirs from it.

    Args:
        experts: object of the MoE block in each layer that has one.
        routers: object of its router.
        attention: object of the attention in each layer with a KV cache.
    """

    def __init__(self, experts: Mapping[int, E], routers: Mapping[int, R], attention: Mapping[int, A]) -> None:
        self._experts, self._routers, self._attention = experts, routers, attention

    def experts(self, layer: int) -> E:
        """Object of the MoE block in ``layer``."""
        return self._experts[layer]

    def router(self, layer: int) -> R:
        """Object of the router in ``layer``."""
        return self._routers[layer]

    def attention(self, layer: int) -> A:
        """Object of the attention in ``layer``."""
        return self._attention[layer]
