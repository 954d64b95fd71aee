"""Names of weights on the two sides, and the checksum of what an engine serves.

A transformers model keeps a layer's experts in two stacked parameters, and ``q_proj``, ``k_proj`` and ``v_proj`` apart.
A checkpoint has a tensor for each expert. A serving engine loads that checkpoint, and keeps ``qkv_proj`` in one piece.
So there are two translations:

- *in*: the trainer's tensors become a checkpoint, by the rules that transformers itself saves with, and go through the
  engine's own loader; experts that come packed go to whoever multiplies them, as they are;
- *out*: the engine's parameters are cut into the trainer's tensors again, and the checksum over those is compared with
  the trainer's. It is taken over what the engine computes with, not over what was sent to it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tracefp4.errors import SyncError, suggest
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec
from tracefp4.integrations.engines.stored import StoredWeight
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.models.packing import PackedWeight, check_packed, digest, expert_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
"""Engine's parameter, and the checkpoint's tensors that it holds one after the other along axis 0."""


def skeleton(folder: str | Path) -> PreTrainedModel:
    """The transformers model of a folder without its weights: names and shapes on the ``meta`` device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def hollow(model: nn.Module) -> Any:
    """A copy of a model without its weights, on the ``meta`` device."""
    memo = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


class Names:
    """Translation between a transformers model and its checkpoint.

    Args:
        model: the model, with or without weights.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layout: ModelLayout = describe(model)
        self.parameters: dict[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.experts = {
            f"{path}.{projection}": (layer, projection)
            for layer, path in self.layout.experts.items()
            for projection in ("gate_up_proj", "down_proj")
        }
        """Stacked parameters: layer and projection by name."""
        self._transposed = {name: transposed for name, _, transposed in expert_weights(model, self.layout)}
        self._plain = self._plain_names()
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(self.parameters)
        self.tied: dict[str, str] = {name: self._owner(model, name) for name in sorted(tied)}
        """Second names of tied parameters."""

    def check(self, state: Mapping[str, Tensor | PackedWeight], numerics: Numerics | None) -> None:
        """Refuse a state that is not exactly the model's.

        Args:
            state: every parameter by name; experts may come packed.
            numerics: of the engine's expert weights.

        Raises:
            SyncError: naming the first tensor that is missing, unknown, of another shape, or packed otherwise.
            FormatError: parts of a packed weight that do not fit one another.
        """
        missing = [name for name in self.parameters if name not in state]
        if missing:
            raise SyncError(
                f"{len(missing)} of {len(self.parameters)} parameters are missing from the sync, first {missing[0]!r}"
            )
        for name, tensor in state.items():
            if name not in self.parameters and name not in self.tied:
                raise SyncError(f"the engine's model has no parameter {name!r}{suggest(name, self.parameters)}")
            expected = self.parameters[self.tied.get(name, name)]
            if isinstance(tensor, PackedWeight):
                transposed = self._transposed.get(name)
                mine = None if transposed is None else numerics
                check_packed(name, tensor, mine, expected, transposed=bool(transposed))
            elif tuple(tensor.shape) != expected:
                raise SyncError(f"{name!r} has shape {tuple(tensor.shape)}, the engine's has {expected}")

    def checkpoint(self, state: Mapping[str, Tensor | PackedWeight]) -> dict[str, Tensor]:
        """The checkpoint that transformers would save of ``state``, second names of tied parameters included.

        Weights that come packed are left out: see :func:`tracefp4.integrations.engines.experts.place_packed`.
        """
        from transformers.core_model_loading import revert_weight_conversion

        given = {name: state[name] for name in self.parameters}
        whole = {name: tensor.detach() for name, tensor in given.items() if isinstance(tensor, Tensor)}
        found: dict[str, Tensor] = dict(revert_weight_conversion(self.model, whole))
        return found | {name: found[self._plain[owner]] for name, owner in self.tied.items()}

    def packed(self, layer: int, projection: str, kept: StoredWeight, spec: Spec) -> PackedWeight:
        """An expert projection that an engine keeps in FP4 itself, as the trainer packs it.

        Raises:
            SyncError: the spec does not quantize weights, or they cannot be compared.
        """
        name = f"{self.layout.experts[layer]}.{projection}"
        if spec.weights is None:
            raise SyncError(f"{name!r} is kept in FP4, but spec {spec.name!r} leaves weights as they are")
        return kept.packed(name, self.parameters[name], spec.weights)

    def plain(self, name: str) -> str:
        """Name of an unstacked parameter in the checkpoint."""
        return self._plain[name]

    def _plain_names(self) -> dict[str, str]:
        """What transformers renames on saving, found by saving tensors that can be told apart."""
        from transformers.core_model_loading import revert_weight_conversion

        names = [name for name in self.parameters if name not in self.experts]
        marks = {name: torch.empty(0, index, device="meta") for index, name in enumerate(names)}
        found = revert_weight_conversion(self.model, marks)
        by_mark = {tensor.shape[1]: name for name, tensor in found.items()}
        return {name: by_mark[index] for index, name in enumerate(names)}

    @staticmethod
    def _owner(model: Any, name: str) -> str:
        target = model.get_parameter(name)
        return next(n for n, p in model.named_parameters() if p is target)


class Served:
    """The trainer's tensors, read out of an engine's parameters.

    Args:
        names: of the model.
        parameters: the engine's parameters by name.
        packed: packed expert weights by layer and projection; empty when the spec does not quantize weights.
        stacked: the engine's stacked expert parameters by layer and projection, gate before up.
    """

    def __init__(
        self,
        names: Names,
        parameters: Mapping[str, Tensor],
        packed: Mapping[tuple[int, str], PackedWeight],
        stacked: Mapping[tuple[int, str], Tensor],
    ) -> None:
        self._names, self._parameters, self._packed, self._stacked = names, parameters, packed, stacked

    def digest(self) -> str:
        """Checksum, equal to :func:`tracefp4.models.packing.model_digest` of the trainer's model.

        Raises:
            SyncError: a tensor of the trainer's is not among the engine's parameters, or a tied one differs.
        """
        for second, owner in self._names.tied.items():
            if second in self._parameters and not torch.equal(self._cut(second, owner), self._plain(owner)):
                raise SyncError(f"{second!r} is tied to {owner!r}, but the engine serves another tensor under it")
        return digest(dict(self._parts()))

    def _parts(self) -> Iterator[tuple[str, Iterable[Tensor]]]:
        for name in self._names.parameters:
            key = self._names.experts.get(name)
            if key is None:
                yield name, (self._plain(name),)
            elif key in self._packed:
                yield name, tuple(self._packed[key].parts())
            elif key in self._stacked:
                yield name, (self._stacked[key],)
            else:
                raise SyncError(f"{name!r} is not among the stacked experts that the engine serves")

    def _plain(self, name: str) -> Tensor:
        return self._cut(self._names.plain(name), name)

    def _cut(self, stored: str, name: str) -> Tensor:
        """The tensor ``name`` of the trainer, found under the checkpoint's name ``stored``."""
        shape = self._names.parameters[name]
        if stored in self._parameters:
            # Engines pad a vocabulary to a multiple of their tile.
            tensor = self._parameters[stored].detach()[: shape[0]]
        else:
            tensor = self._slice(stored, name)
        if tuple(tensor.shape) != shape:
            raise SyncError(f"{name!r} has shape {shape}, the engine serves {tuple(tensor.shape)} under {stored!r}")
        return tensor

    def _slice(self, stored: str, name: str) -> Tensor:
        for whole, parts in FUSED:
            for index, part in enumerate(parts):
                if f".{part}." not in stored:
                    continue
                fused = self._parameters.get(stored.replace(f".{part}.", f".{whole}."))
                if fused is not None:
                    sizes = [self._names.parameters[name.replace(f".{part}.", f".{p}.")][0] for p in parts]
                    start = sum(sizes[:index])
                    return fused.detach()[start : start + sizes[index]]
        raise SyncError(f"{name!r} is not among the parameters that the engine serves, nor in one that holds it")
