"""Decoder layers compiled for decoding.

A decode step of an uncompiled model spends much of its time in small kernels: casts of a norm, RoPE, residual
additions, gates. ``torch.compile`` fuses them. It is applied *regionally*, to the decoder layer and not to the model:
all layers of a kind share one compiled graph, so compiling takes seconds, whatever the depth. The seams stay what they
are (:mod:`tracefp4.models.opaque`): quantizing, recording, attention and experts run as if nothing had been compiled.

Fused arithmetic rounds less often than the separate kernels of a trainer do: a norm and what follows it stay in float32
registers. That is how serving engines compute, and one of the reasons why a rollout and its trainer differ. Products
of one input, such as Q, K and V, become one (:mod:`tracefp4.rollout.projections`), and norms and rotary embedding of
queries and keys belong to the launch that stores K and V (:mod:`tracefp4.models.heads`), with a trainer's roundings.
So do the residual sums beside the experts, and the norm before them, belong to their launches
(:mod:`tracefp4.rollout.rewrite`).

Where no kernel of ours samples, the sampler is compiled as well, on its own: as separate operations its random numbers
would cross memory some twenty times, 64 bits for each token of the vocabulary and sequence. Its random bits are the
same either way; logarithms may differ in their last bit.

So are the two things that a decoder computes once a step around its layers, angles of positions and the last norm.

Prefill runs uncompiled: its tensors are large, and their lengths differ every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tracefp4.models import norms
from tracefp4.models.experts import site_of
from tracefp4.models.layout import ModelLayout
from tracefp4.rollout.projections import join
from tracefp4.rollout.rewrite import Backend, rewriting

_FIXED_ANGLES = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary embedding in transformers whose frequencies do not change with the length of a sequence."""


def compile_layers(model: nn.Module, layout: ModelLayout, backend: str | Backend = "inductor") -> tuple[int, ...]:
    """Let decoder layers be compiled at their first call inside of :func:`compiling`.

    Layers with softmax attention are, and gated delta nets that step in the rows of the state pool. Other
    linear-attention layers keep their state in cache objects of their own, one for each layer, which would cost a
    compilation each; they stay as they are.

    Args:
        model: with the decoder of ``layout``.
        layout: of the model.
        backend: of ``torch.compile``.

    Returns:
        The numbers of the layers.
    """
    layers: nn.ModuleList = model.get_submodule(layout.decoder).layers  # type: ignore[assignment]
    as_they_are = set(layout.linear_layers) - set(layout.deltas)
    chosen = tuple(index for index in range(layout.num_layers) if index not in as_they_are)
    mixers = {**layout.attentions, **layout.deltas}
    for part in _around(model.get_submodule(layout.decoder)):
        part.compile(dynamic=True, backend=backend)
    for index in chosen:
        mixer = model.get_submodule(mixers[index])
        join(mixer)
        if index in layout.moe_layers and site_of(model.get_submodule(layout.experts[index])).takes_norm:
            for child in layers[index].children():
                norms.keep_whole(child)
        layers[index].compile(dynamic=True, backend=rewriting(backend))
    return chosen


def _around(decoder: nn.Module) -> list[nn.Module]:
    """What a decoder computes once a step, around its layers: the angles of the positions, and the last norm."""
    parts = []
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    if getattr(rotary, "rope_type", None) in _FIXED_ANGLES:
        parts.append(rotary)
    return parts if norm is None else [*parts, norm]


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, numbers that modules hold are inputs of their compiled graph, so that layers share it."""
    from torch._dynamo import config

    with config.patch(allow_unspec_int_on_nn_module=True):
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled layers run as written."""
    with torch.compiler.set_stance("force_eager"):
        yield
