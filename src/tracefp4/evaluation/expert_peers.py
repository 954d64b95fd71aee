"""Expert products of other libraries, beside which ours are measured. None of them is needed for anything else.

``humming``
    the package ``humming-kernels`` (0.1.20): NVFP4 weights and bfloat16 activations. Its kernels are chosen by its own
    heuristics and compiled when first met. Tokens find their experts by an index of blocks, or stand in the order of
    their experts; both are timed. Between the products stands our kernel of SiLU times up.
``triton_kernels``
    the kernels that come with Triton's sources, as ``sgl-kernel`` 0.3.21 installs them: MXFP4 weights in the layout for
    Hopper's registers and bfloat16 activations, SwiGLU within the first product.

Both compute what :mod:`tracefp4.evaluation.bench_experts` calls the pair: without routing and without the weighted sum.
Weights are random codes and scales, loaded as from a checkpoint. A layer knows what its rows should be
(:mod:`tracefp4.evaluation.peer_check`), and the benchmark says how far off they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.evaluation.peer_check import Packed, Way, clamped_swiglu, pair_in_float64, silu_gate

Work = Callable[[], object]


class Layer(Protocol):
    """The experts of one layer in a library's own form."""

    def works(self, chosen: Tensor, x: Tensor) -> list[Way]:
        """Ways to compute the pair of tokens ``x (B, hidden)`` that chose ``chosen (B, top_k)``."""
        ...

    def expected(self, x: Tensor, way: Way) -> Tensor:
        """What a way should return, float64 ``(rows, hidden)``."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A library."""

    module: str
    """What is imported."""
    package: str
    """What installs it."""
    bits: float
    """Bits of a weight, scales included."""
    make: Callable[[int, int, int, torch.device], Layer]
    """From experts, hidden size and intermediate size."""

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured, or ``None``."""
        if importlib.util.find_spec(self.module) is not None:
            return None
        return f"{self.module} is not installed ({self.package} has it)"


@dataclass(slots=True)
class Humming:
    """NVFP4 experts of ``humming-kernels``."""

    experts: int
    hidden: int
    inter: int
    device: torch.device
    layers: list[Any] = field(init=False)
    packed: list[Packed] = field(init=False)

    def __post_init__(self) -> None:
        from humming.layer import HummingLayer  # type: ignore[import-not-found]

        self.layers, self.packed = [], []
        nvfp4 = {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"}
        for out, inner in ((2 * self.inter, self.hidden), (self.hidden, self.inter)):
            layer = HummingLayer(
                shape_n=out, shape_k=inner, weight_config=dict(nvfp4), num_experts=self.experts,
                torch_dtype=torch.bfloat16,
            ).to(self.device)  # fmt: skip
            packed = Packed.random(self.experts, out, inner, self.device, mx=False)
            tensors = {
                "weight": packed.codes.view(torch.int32),
                "weight_scale": packed.scales.view(torch.float8_e4m3fn),
                "weight_scale_2": packed.factor,
            }
            layer.load_from_tensors(tensors)
            layer.transform()
            self.layers.append(layer)
            self.packed.append(packed)

    def works(self, chosen: Tensor, x: Tensor) -> list[Way]:
        """By an index of blocks, where rows are pairs in order, and in the order of experts."""
        top_k, flat = chosen.shape[1], chosen.flatten()
        pairs, order = torch.arange(len(flat), device=flat.device), flat.argsort(stable=True)
        return [
            Way("indexed", self._indexed(chosen, x), pairs // top_k, flat),
            Way("grouped_contiguous", self._grouped(chosen, x, order), order // top_k, flat[order]),
        ]

    def expected(self, x: Tensor, way: Way) -> Tensor:
        """See :class:`Layer`."""
        return pair_in_float64(x, way, (self.packed[0], self.packed[1]), silu_gate)

    def _indexed(self, chosen: Tensor, x: Tensor) -> Work:
        from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

        from tracefp4.kernels.gate import gate

        compute, launches = {"gemm_type": "indexed"}, []
        for layer, top_k in zip(self.layers, (chosen.shape[1], 1), strict=True):
            config = get_heuristics_config(layer.humming_config, chosen.numel(), gemm_type="indexed", device=x.device)
            index = blocks_of_experts(chosen, self.experts, config["block_shape"][0])
            launches.append(
                {"top_k": top_k, "compute_config": compute, "tuning_config": config}
                | dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), index, strict=True))
            )
        first, second = self.layers
        return lambda: second(gate(first(x, **launches[0])), **launches[1])

    def _grouped(self, chosen: Tensor, x: Tensor, order: Tensor) -> Work:
        from tracefp4.kernels.gate import gate

        tokens = order // chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=self.experts)
        options = {
            "expert_layout": F.pad(counts.cumsum(0), (1, 0)),
            "compute_config": {"gemm_type": "grouped_contiguous"},
        }
        first, second = self.layers
        return lambda: second(gate(first(x.index_select(0, tokens), **options)), **options)


def blocks_of_experts(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of token and expert in blocks of one expert each.

    Args:
        chosen: ``(B, top_k)``.
        experts: how many there are.
        block: pairs of a block.

    Returns:
        int32 pair of each row, expert after expert, each filled up to whole blocks with the number of pairs; int32
        expert of each block; int32 number of rows ``()``.
    """
    flat = chosen.flatten()
    counts = flat.bincount(minlength=experts)
    blocks = (counts + block - 1) // block
    order = flat.argsort(stable=True)
    # Where an expert's rows start, less where its pairs start in the sorted order.
    shift = (blocks * block).cumsum(0) - blocks * block - (counts.cumsum(0) - counts)
    rows = torch.arange(flat.numel(), device=flat.device) + shift[flat[order]]
    total = int(blocks.sum()) * block
    pairs = torch.full((total,), flat.numel(), dtype=torch.int32, device=flat.device)
    pairs[rows] = order.to(torch.int32)
    owners = torch.arange(experts, device=flat.device, dtype=torch.int32).repeat_interleave(blocks)
    return pairs, owners, torch.tensor(total, dtype=torch.int32, device=flat.device)


SWIGLU = (1.702, 7.0)
"""Alpha and limit of the gate of gpt-oss."""


@dataclass(slots=True)
class TritonKernels:
    """MXFP4 experts of ``triton_kernels``."""

    experts: int
    hidden: int
    inter: int
    device: torch.device
    warps: int = 4
    """Of a program, which the layout of scales depends on."""
    weights: list[tuple[Any, Any]] = field(init=False)
    packed: list[Packed] = field(init=False)

    def __post_init__(self) -> None:
        self.packed = [
            Packed.random(self.experts, out, inner, self.device, mx=True)
            for out, inner in ((2 * self.inter, self.hidden), (self.hidden, self.inter))
        ]
        self.weights = [self._weight(packed.codes, packed.scales) for packed in self.packed]

    def _weight(self, codes: Tensor, scales: Tensor) -> tuple[Any, Any]:
        """Codes and scales of ``(E, inner, out)``, swizzled, and the precision that names the scales."""
        from triton_kernels.matmul_ogs import PrecisionConfig  # type: ignore[import-not-found]
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor  # type: ignore[import-not-found]
        from triton_kernels.tensor_details import layout  # type: ignore[import-not-found]

        of_values, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        of_scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=self.warps)
        value = convert_layout(wrap_torch_tensor(codes.transpose(1, 2), dtype=FP4), of_values, **value_options)
        scale = convert_layout(wrap_torch_tensor(scales.transpose(1, 2)), of_scales, **scale_options)
        return value, PrecisionConfig(weight_scale=scale)

    def works(self, chosen: Tensor, x: Tensor) -> list[Way]:
        """The two products, with SwiGLU in the first; rows stay in the order of experts."""
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs  # type: ignore[import-not-found]
        from triton_kernels.routing import routing  # type: ignore[import-not-found]
        from triton_kernels.swiglu import swiglu_fn  # type: ignore[import-not-found]

        # Its routing chooses by itself, so it is given logits that make the choice.
        logits = torch.zeros(len(chosen), self.experts, dtype=torch.bfloat16, device=x.device).scatter_(1, chosen, 1.0)
        data, gathered, _ = routing(logits, chosen.shape[1])
        swiglu = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), SWIGLU, 2)
        (up, up_precision), (down, down_precision) = self.weights

        def pair() -> object:
            h = matmul_ogs(
                x, up, None, data, gather_indx=gathered, precision_config=up_precision, fused_activation=swiglu
            )
            return matmul_ogs(h, down, None, data, precision_config=down_precision)

        # A token's experts come in ascending order there.
        source = gathered.src_indx.long()
        experts = chosen.sort(1)[0].flatten()[source]
        return [Way(f"layout of {self.warps} warps, SwiGLU fused", pair, source // chosen.shape[1], experts)]

    def expected(self, x: Tensor, way: Way) -> Tensor:
        """See :class:`Layer`."""
        gate = partial(clamped_swiglu, alpha=SWIGLU[0], limit=SWIGLU[1])
        return pair_in_float64(x, way, (self.packed[0], self.packed[1]), gate)


PEERS = {
    "humming nvfp4 w4a16": Peer("humming", "humming-kernels", 4.5, Humming),
    "triton_kernels mxfp4 w4a16": Peer("triton_kernels", "sgl-kernel", 4.25, TritonKernels),
}
"""By the name of their arm."""
