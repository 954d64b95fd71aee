"""One model over several ranks: FP32 masters in shards, bfloat16 weights whole for as long as a layer runs.

FSDP2 (``torch.distributed.fsdp.fully_shard``) cuts every parameter along its first axis, so that a rank keeps the
masters, moments and gradients of a part: of some experts, of some rows. Before a layer runs its shards are rounded to
bfloat16 and gathered; afterwards the whole copy goes. In the backward pass the gradients, in bfloat16 as in one
process, are widened to FP32, *added* over the ranks, and each rank keeps its part. Losses are divided by the counts of
all ranks beforehand, so the sum is the gradient of one process that saw all the samples.

The masters are the parameters themselves here. In one process a bfloat16 parameter lies beside its master
(:mod:`tracefp4.training.optimizer`); here ``round(master)`` is made when a layer is gathered, to the same bits.

Every forward and backward is collective: the ranks need equally many of each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tracefp4.errors import ModelError
from tracefp4.models.layout import ModelLayout
from tracefp4.training.policy import SCORE, score_whole
from tracefp4.training.ranks import Ranks


def shard(model: nn.Module, layout: ModelLayout, ranks: Ranks) -> None:
    """Shard a model that is bound to its sites, in place; the same weights must lie on all ranks.

    Afterwards only :func:`tracefp4.training.policy.score_tokens` and calls of ``model`` itself run it.

    Args:
        model: a causal language model in one floating-point dtype, on this rank's device.
        layout: where its decoder layers are.
        ranks: the processes that share it.

    Raises:
        ModelError: parameters of several dtypes: which one a gathered weight should have would be a guess.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    first, parameter = next(iter(model.named_parameters()))
    for name, other in model.named_parameters():
        if other.dtype != parameter.dtype:
            raise ModelError(
                f"a sharded model needs one dtype: {first!r} is {parameter.dtype} and {name!r} is {other.dtype}; "
                "train this model in one process"
            )
    dtype = parameter.dtype
    mesh = init_device_mesh(parameter.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = model.get_submodule(f"{layout.decoder}.layers").children()
    for module in [*layers, model]:
        for part in module.parameters():
            if not isinstance(part, DTensor):
                part.data = part.data.to(torch.float32)
        # Tied embeddings belong to two modules, so everything outside the layers is one group: the model's.
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        if isinstance(sharded, FSDPModule):
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    setattr(model, SCORE, types.MethodType(score_whole, model))
    register_fsdp_forward_method(model, SCORE)
    model.__dict__[_DTYPE] = dtype


_DTYPE = "tracefp4_dtype"
"""Attribute of a sharded model: the dtype in which its layers run."""


def weights(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters by name as the forward pass sees them.

    Those of a sharded model are gathered one by one, when they are asked for, and kept by nobody: the ranks have to ask
    for the same ones in the same order.
    """
    parameters = dict(model.named_parameters())
    dtype = model.__dict__.get(_DTYPE)
    if dtype is None:
        return parameters
    return Lazy({name: _gathering(p, dtype) for name, p in parameters.items()})


def _gathering(parameter: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: whole(local(parameter).to(dtype), parameter)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, without history; all of it if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which ``part`` is this rank's part, cut as the parameter ``like`` is; collective."""
    if not isinstance(like, DTensor):
        return part
    placed = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return placed.full_tensor()


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as ``like`` is; no rank hears of another."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for.

    Args:
        make: what makes each.
    """

    def __init__(self, make: Mapping[str, Callable[[], Tensor]]) -> None:
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        return self._make[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._make

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)
