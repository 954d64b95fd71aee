"""Where a model keeps its experts, routers and KV heads, and how large they are.

A :class:`ModelLayout` is read off the modules of a loaded model, not off a table of model names: an *experts module* is
one with stacked ``gate_up_proj`` and ``down_proj`` parameters, a *router* is its sibling that picks ``top_k`` experts,
an *attention module* is one with a ``layer_idx`` and a key or latent projection. A family that transformers adds later
is described by the same rules, and a model that breaks them is refused here rather than half quantized.

From a layout and a spec follow the :class:`~tracefp4.core.SiteShape` objects: which tensors are quantized for a token,
and how many values each has. Both sides, the plan and the codec count with these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import FormatError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from tracefp4.formats.numerics import Numerics
    from tracefp4.formats.spec import Spec


DELTA_NETS = ("Qwen3_5MoeGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3NextGatedDeltaNet")
"""Classes of transformers with one and the same arithmetic between their projections."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The parts of a model that concern quantization. Layers are indices of decoder layers.

    Sizes are in values. ``kv_heads``, ``head_dim`` and ``v_head_dim`` are those of the K and V that the attention
    function sees; with latent attention K and V are expanded to one head for each query head, while what a cache keeps
    is ``latent_rank + rope_dim`` values a token. Names are paths for ``model.get_submodule``.
    """

    family: str
    """``model_type`` of the decoder's configuration, such as ``qwen3_moe``."""
    num_layers: int
    moe_layers: tuple[int, ...]
    kv_layers: tuple[int, ...]
    """Layers with a KV cache."""
    linear_layers: tuple[int, ...]
    """Layers with linear attention: a recurrent state instead of a KV cache, never quantized."""
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    """Input width of the experts' down projection; 0 without experts."""
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_rank: int | None = None
    """Width of the compressed KV vector of latent attention, else ``None``."""
    rope_dim: int | None = None
    """Width of the rotated key part that latent attention keeps beside it, shared by all heads, else ``None``."""
    experts: Mapping[int, str] = field(default_factory=dict)
    routers: Mapping[int, str] = field(default_factory=dict)
    attentions: Mapping[int, str] = field(default_factory=dict)
    latents: Mapping[int, str] = field(default_factory=dict)
    """Names of the modules that normalise the latent vector."""
    deltas: Mapping[int, str] = field(default_factory=dict)
    """Those of ``linear_layers`` whose module is a gated delta net that an engine can step by itself."""
    decoder: str = ""
    """Name of the module that owns the list of decoder layers; ``""`` for the model itself."""

    def site_shapes(self, spec: Spec) -> tuple[SiteShape, ...]:
        """Return the shape of every site that ``spec`` quantizes, layer by layer, in the order the forward meets them.

        Layers that the spec leaves in bfloat16 have none.

        Raises:
            ModelError: the spec quantizes experts and the model has none, or KV and no layer has a cache; or it leaves
                out as many layers as there are.
            FormatError: a width is not a multiple of the block size.
        """
        if (spec.activations is not None or spec.weights is not None) and not self.moe_layers:
            raise ModelError(
                f"spec {spec.name!r} quantizes experts, but the {self.family} model has no MoE layer; "
                "use a spec for KV only, or turn the dense model into a mixture of experts first"
            )
        if spec.kv is not None and not self.kv_layers:
            raise ModelError(f"spec {spec.name!r} quantizes KV, but no layer of the {self.family} model has a KV cache")
        if spec.bf16_layers >= self.num_layers:
            raise ModelError(
                f"spec {spec.name!r} leaves {spec.bf16_layers} layers in bfloat16, the {self.family} model has "
                f"{self.num_layers}; leave out fewer, or use spec 'bf16'"
            )
        shapes: list[SiteShape] = []
        for layer in range(spec.bf16_layers, self.num_layers):
            if spec.kv is not None and layer in self.attentions:
                shapes += [
                    _shape(layer, kind, *size, spec.kv, self.attentions) for kind, size in self.kv_sizes().items()
                ]
            if spec.activations is not None and layer in self.experts:
                for kind, size in (
                    (Kind.EXPERTS_IN, (1, self.hidden)),
                    (Kind.EXPERTS_MID, (self.top_k, self.intermediate)),
                ):
                    shapes.append(_shape(layer, kind, *size, spec.activations, self.experts))
        return tuple(shapes)

    def recordable_shapes(self, spec: Spec) -> tuple[SiteShape, ...]:
        """Return the sites that guidance can be about: every one whose neighbouring codes differ in their lowest bit.

        That holds for E2M1 and for the E4M3 elements of MXFP8, so these are all of :meth:`site_shapes`. What an engine
        records, what a plan weighs and what a trainer expects are all selected from them.
        """
        return self.site_shapes(spec)

    def kv_sizes(self) -> dict[Kind, tuple[int, int]]:
        """``(vectors, width)`` of what a layer caches for a token: K and V, or the latent and the rotated key part."""
        if self.latent_rank is not None and self.rope_dim is not None:
            return {Kind.LATENT: (1, self.latent_rank), Kind.K: (1, self.rope_dim)}
        return {Kind.K: (self.kv_heads, self.head_dim), Kind.V: (self.kv_heads, self.v_head_dim)}


def _shape(layer: int, kind: Kind, vectors: int, width: int, numerics: Numerics, names: Mapping[int, str]) -> SiteShape:
    if width % numerics.block:
        raise FormatError(
            f"site {layer}.{kind} ({names[layer]}): width {width} is not a multiple of the block size "
            f"{numerics.block} of {numerics.name}"
        )
    return SiteShape(Site(layer, kind), vectors, width, numerics.block, numerics.scope == "token")


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` holds the stacked weights of a layer's routed experts."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def is_router(module: nn.Module) -> bool:
    """Whether ``module`` chooses ``top_k`` of ``num_experts`` experts for each token."""
    return hasattr(module, "top_k") and hasattr(module, "num_experts") and hasattr(module, "weight")


def is_attention(module: nn.Module) -> bool:
    """Whether ``module`` is softmax attention that keeps K and V: multi-head, grouped or latent."""
    if not hasattr(module, "layer_idx") or not hasattr(module, "config"):
        return False
    return (hasattr(module, "k_proj") and hasattr(module, "v_proj")) or hasattr(module, "kv_b_proj")


def is_delta(module: nn.Module) -> bool:
    """Whether ``module`` is a gated delta net that :mod:`tracefp4.models.delta` knows how to step."""
    # By class: other families give the same names of parameters another arithmetic.
    return type(module).__name__ in DELTA_NETS and getattr(module, "activation", None) == "silu"


def describe(model: nn.Module) -> ModelLayout:
    """Read the layout of a transformers model: a causal language model, or a composite one that contains a decoder.

    Raises:
        ModelError: no decoder, or parts that do not fit together.
    """
    name, layers = _decoder_layers(model)
    found = [_parts(f"{name}.{index}", layer) for index, layer in enumerate(layers)]
    attentions = {i: part["attention"] for i, part in enumerate(found) if "attention" in part}
    experts = {i: part["experts"] for i, part in enumerate(found) if "experts" in part}
    routers = {i: part["router"] for i, part in enumerate(found) if "router" in part}
    linear = tuple(i for i in range(len(found)) if i not in attentions)
    config = _decoder_config(model, name, attentions)
    _check_types(config, attentions, linear, name)
    sizes = {**_expert_sizes(model, experts, routers), **_attention_sizes(model, attentions)}
    latents = {i: f"{path}.kv_a_layernorm" for i, path in attentions.items()} if sizes["latent_rank"] else {}
    return ModelLayout(
        family=config.model_type.removesuffix("_text"),
        num_layers=len(found),
        moe_layers=tuple(experts),
        kv_layers=tuple(attentions),
        linear_layers=linear,
        hidden=config.hidden_size,
        experts=experts,
        routers=routers,
        attentions=attentions,
        latents=latents,
        deltas={i: part["delta"] for i, part in enumerate(found) if "delta" in part},
        decoder=name.rpartition(".")[0],
        **sizes,
    )


def _decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of decoder layers. A composite model also has encoders; its decoder holds the experts."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and re.search(r"(^|\.)layers$", name)
    ]
    lists = [(name, module) for name, module in lists if any(map(is_attention, module.modules()))]
    if len(lists) > 1:
        lists = [(name, module) for name, module in lists if any(map(is_experts, module.modules()))]
    if len(lists) != 1:
        raise ModelError(
            f"{type(model).__name__}: expected one list of decoder layers with attention, found {len(lists)}; "
            "pass the causal language model of a transformers decoder family"
        )
    return lists[0]


def _parts(prefix: str, layer: nn.Module) -> dict[str, str]:
    """Names of attention, experts and router in one decoder layer."""
    parts: dict[str, str] = {}
    for name, module in layer.named_modules():
        kind = _kind(module)
        if kind is None:
            continue
        if kind in parts:
            raise ModelError(f"{prefix}: more than one {kind} module in a layer ({parts[kind]}, {prefix}.{name})")
        parts[kind] = f"{prefix}.{name}"
        if kind == "experts":
            block_name = name.rpartition(".")[0]
            block = layer.get_submodule(block_name)
            routers = [
                child for child, sibling in block.named_children() if sibling is not module and is_router(sibling)
            ]
            if len(routers) != 1:
                raise ModelError(f"{prefix}.{block_name}: expected one router beside the experts, found {len(routers)}")
            parts["router"] = f"{prefix}.{block_name}.{routers[0]}"
    return parts


def _kind(module: nn.Module) -> str | None:
    for kind, is_kind in (("attention", is_attention), ("experts", is_experts), ("delta", is_delta)):
        if is_kind(module):
            return kind
    return None


def _decoder_config(model: nn.Module, name: str, attentions: Mapping[int, str]) -> PretrainedConfig:
    if not attentions:
        raise ModelError(f"{name}: no attention module found")
    attention: Any = model.get_submodule(next(iter(attentions.values())))
    return attention.config


def _check_types(config: PretrainedConfig, attentions: Mapping[int, str], linear: tuple[int, ...], name: str) -> None:
    """Compare what was found with the configuration's own list, so that an unknown kind of layer is not passed over."""
    types = getattr(config, "layer_types", None)
    for layer in linear:
        kind = types[layer] if types else "unknown"
        if "linear" not in kind and kind not in ("conv", "mamba"):
            raise ModelError(f"{name}.{layer}: a layer of type {kind!r} without an attention module that we know")
    for layer in attentions:
        if types and not types[layer].endswith("attention"):
            raise ModelError(f"{name}.{layer}: attention was found in a layer of type {types[layer]!r}")


def _expert_sizes(model: nn.Module, experts: Mapping[int, str], routers: Mapping[int, str]) -> dict[str, int]:
    sizes = set()
    for layer, name in experts.items():
        module: Any = model.get_submodule(name)
        router: Any = model.get_submodule(routers[layer])
        contraction = 1 if getattr(module, "is_transposed", False) else 2
        sizes.add((int(module.down_proj.shape[0]), int(router.top_k), int(module.down_proj.shape[contraction])))
    if len(sizes) > 1:
        raise ModelError(f"MoE layers differ in (experts, top_k, intermediate size): {sorted(sizes)}")
    num_experts, top_k, intermediate = sizes.pop() if sizes else (0, 0, 0)
    return {"num_experts": num_experts, "top_k": top_k, "intermediate": intermediate}


def _attention_sizes(model: nn.Module, attentions: Mapping[int, str]) -> dict[str, int | None]:
    sizes = set()
    for layer, name in attentions.items():
        module: Any = model.get_submodule(name)
        if module.layer_idx != layer:
            raise ModelError(f"{name}: its layer_idx is {module.layer_idx}, but it stands in layer {layer}")
        heads = module.config.num_attention_heads
        if hasattr(module, "kv_b_proj"):
            dims = (module.qk_head_dim, module.v_head_dim, module.kv_lora_rank, module.qk_rope_head_dim)
            sizes.add((heads, heads, *dims))
        else:
            kv_heads = module.k_proj.out_features // module.head_dim
            sizes.add((heads, kv_heads, module.head_dim, module.v_proj.out_features // kv_heads, None, None))
    if len(sizes) > 1:
        raise ModelError(f"attention layers differ in (heads, KV heads, widths): {sorted(map(str, sizes))}")
    names = ("heads", "kv_heads", "head_dim", "v_head_dim", "latent_rank", "rope_dim")
    return dict(zip(names, sizes.pop(), strict=True))
