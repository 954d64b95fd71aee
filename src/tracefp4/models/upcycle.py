"""A dense language model turned into a mixture of experts.

*Sparse upcycling* (Komatsuzaki et al., arXiv 2212.05055) copies a dense MLP into every expert. With a router that
renormalises its top-k weights the copy computes what the dense model computed: equal experts, weights that sum to one,
whatever the router says. A model with SwiGLU and no q/k norms fits :class:`transformers.MixtralForCausalLM` exactly.

Equal experts are no mixture, though: routes change nothing, the router has no gradient, and its errors cost nothing.
The symmetry must be broken. Drop-upcycling (Nakamura et al., arXiv 2502.19261) gives every expert a *random* share of
fresh intermediate channels, and leaves it to billions of training tokens to make routes meaningful. We have a warm
start of a few hundred steps, so the share is *chosen* (:mod:`tracefp4.models.split`): tokens of a short calibration
text are clustered, the router sends each cluster to its experts, and an expert gives up the channels that matter little
to its own tokens and much to the others'. Given-up channels start afresh as drop-upcycling does: gate and up rows drawn
with the tensor's own standard deviation, but with their column of the down projection at zero. So the new model is
exactly the one that was calibrated, and the fresh channels learn from the first step, because the gradient of a down
column is its activation times the error.

On SmolLM2-135M with 8 experts, top-2 and a quarter of the channels this costs 0.40 nat of held-out loss, and routes of
other tokens cost 1.3 more. Random shares under the same routers cost 1.6 nat, and foreign routes then cost nothing
(``docs/models.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tracefp4.errors import ModelError, suggest

if TYPE_CHECKING:
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

METHOD = "split-2"
"""Names the method in caches and provenance; changes whenever the resulting weights do."""
FAMILIES = ("llama", "mistral")
_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """What makes the experts of one layer differ."""

    router: Tensor
    """``(experts, hidden)`` float32, of values that bfloat16 holds: the router's weight."""
    fresh: Tensor
    """``(experts, n)`` int64, ascending: intermediate channels that each expert starts afresh."""


def upcycle(dense: PreTrainedModel, experts: int, top_k: int, *, seed: int = 0) -> MixtralForCausalLM:
    """Copy a dense model into a mixture of ``experts`` equal experts: same function, same dtype, on the CPU.

    The router is random; with equal experts that changes nothing.

    Args:
        dense: a Llama-like causal language model (SwiGLU, no biases, no q/k norm).
        experts: experts a layer, 3 to 256.
        top_k: experts a token, at least 2 and fewer than ``experts``.
        seed: seed of the router.

    Raises:
        ModelError: the model has parts that Mixtral lacks, or the sizes are impossible.
    """
    from transformers import MixtralForCausalLM

    check_sizes(experts, top_k)
    config = _mixtral_config(dense, experts, top_k)
    with torch.device("meta"):
        moe: Any = MixtralForCausalLM(config)
    moe = moe.to(dense.dtype).to_empty(device="cpu")
    moe.tie_weights()
    moe.model.rotary_emb = type(moe.model.rotary_emb)(config)
    if dense.generation_config is not None:
        moe.generation_config = dense.generation_config
    generator = torch.Generator().manual_seed(seed)
    source = dict(dense.named_parameters())
    with torch.no_grad():
        for name, target in moe.named_parameters():
            if ".experts." not in name and ".gate.weight" not in name:
                target.copy_(source.pop(name))
        for layer, block in enumerate(moe.model.layers):
            gate, up, down = (source.pop(f"model.layers.{layer}.mlp.{part}") for part in _MLP)
            block.mlp.experts.gate_up_proj.copy_(torch.cat((gate, up)).expand(experts, -1, -1))
            block.mlp.experts.down_proj.copy_(down.expand(experts, -1, -1))
            block.mlp.gate.weight.copy_(uniform((experts, config.hidden_size), config.hidden_size**-0.5, generator))
    return moe.eval()


def check_sizes(experts: int, top_k: int) -> None:
    """Refuse sizes that make no mixture of experts.

    Raises:
        ModelError: fewer than 3 or more than 256 experts, or a ``top_k`` that is 1 or leaves no choice.
    """
    if not 3 <= experts <= 256:
        raise ModelError(f"cannot upcycle into {experts} experts; take 3 to 256")
    if not 2 <= top_k < experts:
        # With top-1 the renormalised gate value is always 1, and the router never gets a gradient.
        raise ModelError(f"cannot route to {top_k} of {experts} experts; take 2 to {experts - 1}")


def break_symmetry(moe: MixtralForCausalLM, split: Sequence[LayerSplit], *, seed: int = 0) -> None:
    """Make the experts of an upcycled model differ, in place.

    Args:
        moe: result of :func:`upcycle`.
        split: one entry a layer, as :func:`tracefp4.models.split.plan_split` makes it.
        seed: seed of the fresh channels. The values are the same on every machine.

    Raises:
        ModelError: the split belongs to a model of another shape.
    """
    layers: Any = moe.model.layers
    if len(split) != len(layers):
        raise ModelError(f"the split has {len(split)} layers, the model {len(layers)}")
    generator = torch.Generator().manual_seed(seed)
    for layer, (block, part) in enumerate(zip(layers, split, strict=True)):
        if part.router.shape != block.mlp.gate.weight.shape or len(part.fresh) != len(part.router):
            raise ModelError(
                f"layer {layer}: the split has a router {tuple(part.router.shape)}, the model one "
                f"{tuple(block.mlp.gate.weight.shape)}"
            )
        with torch.no_grad():
            block.mlp.gate.weight.copy_(part.router)
            _refresh(block.mlp.experts, part.fresh, generator)


def _refresh(experts: Any, fresh: Tensor, generator: torch.Generator) -> None:
    """Redraw gate and up rows of the ``fresh`` channels and silence their down columns."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    width, hidden = down.shape[2], down.shape[1]
    # Equal experts so far: the first one stands for all. Float64, so that the sum's order cannot show in the result.
    deviations = [float(half.double().std()) for half in gate_up[0].split(width)]
    for expert, channels in enumerate(fresh):
        for half, deviation in enumerate(deviations):
            gate_up[expert, half * width + channels] = uniform((len(channels), hidden), deviation, generator).to(
                gate_up
            )
        down[expert, :, channels] = 0


def uniform(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    """Draw float32 values, uniform with mean 0 and the given standard deviation.

    Built from integers and one multiplication, so that one seed gives the same bits on every CPU; the vectorised normal
    and uniform samplers of torch do not promise that.
    """
    steps = 2**16
    values = torch.randint(0, steps, shape, generator=generator).float() - (steps - 1) / 2
    return values * (deviation * (12.0 / (steps**2 - 1)) ** 0.5)


def _mixtral_config(dense: PreTrainedModel, experts: int, top_k: int) -> MixtralConfig:
    from transformers import MixtralConfig

    _check_dense(dense)
    config = dense.config
    return MixtralConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        sliding_window=getattr(config, "sliding_window", None),
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )


def _check_dense(dense: PreTrainedModel) -> None:
    """Refuse whatever would be lost on the way: the copy must compute the same function."""
    family = dense.config.model_type
    if family not in FAMILIES:
        raise ModelError(f"cannot upcycle a model of family {family!r}{suggest(family, FAMILIES)}")
    if dense.config.hidden_act != "silu":
        raise ModelError(
            f"cannot upcycle an MLP with activation {dense.config.hidden_act!r}; Mixtral's experts use 'silu'"
        )
    for name, _ in dense.named_parameters():
        if name.endswith(".bias"):
            raise ModelError(f"cannot upcycle a model with biases ({name}); Mixtral has none")
