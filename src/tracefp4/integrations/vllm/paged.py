"""The attention backend with FP4 pages: K and V are rounded into vLLM's cache and read from there, in both phases.

On a GPU it is vLLM's backend ``CUSTOM``, chosen when the spec quantizes K and V. Pages are 4-bit ones
(:mod:`tracefp4.integrations.vllm.pages`), and attention is the embedded engine's: Triton kernels that widen codes in
registers where they take the model's heads, else gathering and dequantizing in plain torch, on the same device and from
the same pages. Nothing waits for the device: lengths of prompts are known on the host, and a decode step needs none.
On a CPU vLLM takes it when it is asked for, so that what a GPU gets runs in the suite.

vLLM puts requests with one new token first in a batch; they make one decode call, whatever their number. The others
are taken one after the other. Slots below 0 are padding and write to block 0, which vLLM gives to no request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from tracefp4.core import Kind
from tracefp4.errors import EngineError
from tracefp4.formats.numerics import Numerics
from tracefp4.integrations.engines.settings import VARIABLE, active_settings
from tracefp4.integrations.vllm.arguments import PAGED
from tracefp4.integrations.vllm.experts import layer_of
from tracefp4.integrations.vllm.pages import plane_of, row_bytes, row_format
from tracefp4.integrations.vllm.session import installed
from tracefp4.rollout.attend import attend_decode, attend_prefill, slots_of_pages
from tracefp4.rollout.batch import Pieces
from tracefp4.rollout.plane import KERNEL_WIDTHS, KVPlane


def kv_numerics() -> Numerics:
    """Numerics of the cache that this process was told.

    Raises:
        EngineError: no settings, or none that quantize K and V.
    """
    settings = active_settings()
    numerics = None if settings is None else settings.spec.kv
    if numerics is None:
        raise EngineError(
            f"attention backend {PAGED} is tracefp4's FP4 KV cache; it needs the settings file that {VARIABLE} names, "
            "with a spec that quantizes K and V"
        )
    return numerics


@dataclass
class PagedMetadata:
    """What a forward pass attends to, the same for all layers of a group."""

    num_actual_tokens: int
    num_decodes: int
    """Requests with one new token, first in the batch."""
    pages: Tensor
    """int32 ``(decodes, W)`` block tables."""
    page_size: int
    lengths: Tensor
    """``(decodes,)`` tokens to attend to."""
    prefills: Pieces | None
    """The other requests, whose rows come after the decodes."""

    @cached_property
    def context(self) -> Tensor:
        """int64 ``(decodes, W * page)`` slots of :attr:`pages`; made when a layer without a kernel asks."""
        return slots_of_pages(self.pages, self.page_size)


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Builds :class:`PagedMetadata` from what is common to vLLM's backends."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Decode steps whose attention is a kernel have static shapes and no host values."""
        kernels = getattr(kv_cache_spec, "head_size", 0) in KERNEL_WIDTHS
        fits = kernels and vllm_config.model_config.dtype is torch.bfloat16
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if fits else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """The metadata of a pass.

        Raises:
            EngineError: attention that is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise EngineError("FP4 pages are attended to causally; use another attention backend for this model")
        size = self.kv_cache_spec.block_size
        decodes, others, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        # Splits of a kernel have a fixed length, so a shorter table changes no result.
        pages = common.block_table_tensor[:decodes, : -(-common.max_seq_len // size)]
        starts = common.query_start_loc_cpu.tolist()
        lengths = self._host_lengths(common) if others else []
        longer = [i for i in range(decodes, len(lengths)) if starts[i + 1] > starts[i]]
        prefills = None
        if longer:
            slots = [
                slots_of_pages(common.block_table_tensor[i, : -(-lengths[i] // size)], size)[: lengths[i]]
                for i in longer
            ]
            counts, contexts = [starts[i + 1] - starts[i] for i in longer], [lengths[i] for i in longer]
            prefills = Pieces.pack(counts, contexts, torch.cat(slots))
        return PagedMetadata(common.num_actual_tokens, decodes, pages, size, common.seq_lens[:decodes], prefills)

    @staticmethod
    def _host_lengths(common: CommonAttentionMetadata) -> list[int]:
        """Tokens of each request; vLLM's bound on the host is exact for prompts and without speculation."""
        bound = common.seq_lens_cpu_upper_bound
        return (common.seq_lens if bound is None else bound)[: common.num_reqs].tolist()


class PagedBackend(AttentionBackend):
    """vLLM's view of the FP4 pages."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """The member that it is registered under."""
        return PAGED

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        """The implementation."""
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """The builder of its metadata."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layers apart, blocks without gaps; with one row a token the two are the same."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bytes instead of values: one row a token for all heads."""
        if spec.head_size_v != spec.head_size:
            raise EngineError(f"heads of width {spec.head_size} for K and {spec.head_size_v} for V: FP4 pages hold one")
        width = row_bytes(spec.num_kv_heads, spec.head_size, kv_numerics().block)
        return replace(spec, num_head_slots=1, state_content_bytes=width, dtype=torch.uint8)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whole blocks; heads that no kernel takes are computed in plain torch."""
        return head_size % kv_numerics().block == 0

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True


class PagedAttention(AttentionImpl[PagedMetadata]):
    """Attention over FP4 pages; see the module's text.

    Raises:
        EngineError: attention that is not causal attention over its own K and V.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refused = {
            "ALiBi slopes": alibi_slopes is not None,
            "capped logits": bool(logits_soft_cap),
            f"attention of type {attn_type!r}": attn_type != AttentionType.DECODER,
            "K and V of another layer": kv_sharing_target_layer_name is not None,
        }
        for what, asked in refused.items():
            if asked:
                raise EngineError(f"{what}: not computed over FP4 pages inside vLLM; use a spec without kv4")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks, self.window = kv_cache_dtype, sinks, sliding_window
        config = get_current_vllm_config()
        self.max_batch = config.scheduler_config.max_num_seqs
        self._numerics, self._dtype = kv_numerics(), config.model_config.dtype
        self._kept: tuple[int, KVPlane] | None = None

    def plane(self, cache: Tensor) -> KVPlane:
        """The plane over the layer's blocks ``cache``; kept while vLLM keeps them."""
        if self._kept is None or self._kept[0] != cache.data_ptr():
            form = row_format(self.num_kv_heads, self.head_size, self._numerics, self._dtype, cache.device)
            self._kept = cache.data_ptr(), plane_of(cache, form)
        return self._kept[1]

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Round and store.

        Args:
            layer: vLLM's attention layer.
            key: ``(at least T, Hkv, D)`` after RoPE.
            value: ``(at least T, Hkv, D)``.
            kv_cache: the layer's blocks.
            slot_mapping: ``(T,)`` slots; below 0 for padding.
        """
        count = slot_mapping.shape[0]
        slots = slot_mapping.to(torch.int64).clamp(min=0)
        self.plane(kv_cache).write(slots, {Kind.K: key[:count], Kind.V: value[:count]})
        found = installed()
        if found is not None:
            found.recorder.wrote_key_value(layer_of(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to what the pages hold.

        Args:
            layer: vLLM's attention layer.
            query: ``(T, Hq, D)``.
            key: not read, the pages hold it.
            value: likewise.
            kv_cache: the layer's blocks.
            attn_metadata: ``None`` in a run that measures memory.
            output: ``(T, Hq, D)``, written to.
            output_scale: not supported.
            output_block_scale: not supported.

        Returns:
            ``output``.

        Raises:
            EngineError: an output that is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise EngineError("attention over FP4 pages writes the model's dtype; switch fused output quantization off")
        if attn_metadata is None:
            return output.fill_(0)
        plane, m, count = self.plane(kv_cache), attn_metadata, attn_metadata.num_decodes
        shared: dict[str, Any] = {"scaling": self.scale, "window": self.window, "sinks": self.sinks}

        def read(slots: Tensor) -> tuple[Tensor, Tensor]:
            parts = plane.read(slots)
            return parts[Kind.K].transpose(1, 2), parts[Kind.V].transpose(1, 2)

        if count:
            made = attend_decode(
                query[:count].unsqueeze(2), plane.paged(m.page_size), read, m.pages, lambda: m.context, m.lengths,
                max_batch=self.max_batch, **shared,
            )  # fmt: skip
            output[:count] = made.squeeze(1)
        if m.prefills is not None:
            stop = count + sum(m.prefills.counts)
            q = query[count:stop].transpose(0, 1).unsqueeze(0)
            output[count:stop] = attend_prefill(q, plane.paged(1), read, m.prefills, **shared)[0]
        return output
