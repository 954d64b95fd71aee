"""Linear-attention state: what hybrid models (Qwen3-Next, Qwen3.5-MoE) keep instead of K and V.

A gated delta net keeps two tensors of constant size a sequence and layer: the last inputs of a short convolution and a
recurrent matrix. They are never quantized. A *row* of the pool holds the states of one sequence in all linear layers; a
prompt that several samples share hands each of them a copy of the state at its end.

A forward pass *moves* states: it gathers the rows of its batch into a cache object that transformers understands, and
scatters them back afterwards. A decode step would move several times what it needs, so gated delta nets take it where
the states lie (:mod:`tracefp4.models.delta`); for them inputs of the convolution lie taps first, as their kernel reads.

The same cache object serves every model: where a layer has softmax attention it passes K and V through untouched,
because the attention site keeps them in the KV pool. Its presence also tells transformers to build no masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from tracefp4.errors import EngineError, ModelError
from tracefp4.models.layout import DELTA_NETS, ModelLayout

CONTINUING = (*DELTA_NETS, "GraniteMoeHybridMambaLayer", "KimiLinearDeltaAttention")
"""Classes of transformers that take up any number of tokens where :class:`LinearAttentionLayer` left off; tests check
each. Others forget the matrix when several tokens follow (Jamba), or keep something else (MiniMax, LFM2)."""


def check_continues(model: torch.nn.Module, layout: ModelLayout) -> None:
    """Refuse linear-attention layers that would forget, between two forward passes, what came before.

    Raises:
        ModelError: naming the first of them.
    """
    layers: Any = model.get_submodule(layout.decoder).layers
    for index in layout.linear_layers:
        names = [type(part).__name__ for part in layers[index].children() if hasattr(part, "layer_idx")]
        if not any(name in CONTINUING for name in names):
            found = ", ".join(names) or type(layers[index]).__name__
            raise ModelError(
                f"layer {index} of the {layout.family} model ({found}) has a state that this engine does not know how "
                f"to carry from one forward pass to the next; it serves {', '.join(CONTINUING)}"
            )


class PassThrough(CacheLayerMixin):
    """The cache layer of softmax attention: keeps nothing, returns what it is given."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return both tensors as they are."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0: positions are passed explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a cache that holds nothing."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no limit here; the pool has its own."""
        return -1


class EngineCache(Cache):
    """Cache object of a forward pass. K and V pass through, whatever the layer, so that one compiled layer is all."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return both tensors as they are."""
        return key_states, value_states


STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What recurrent matrices may be kept in."""


def state_dtype(name: str) -> torch.dtype:
    """Dtype of recurrent matrices by its name.

    Raises:
        EngineError: none of :data:`STATE_DTYPES`.
    """
    if name not in STATE_DTYPES:
        raise EngineError(f"state_dtype is {name!r}; valid are 'float32' and 'bfloat16'")
    return STATE_DTYPES[name]


class StatePool:
    """States of all sequences, by row. Row ``rows`` is for padding and never handed out.

    Args:
        layout: which layers are linear.
        rows: rows that may be handed out.
        dtype: of the recurrent matrices as they are kept, float32 or bfloat16; what is computed with them is float32.
    """

    def __init__(self, layout: ModelLayout, rows: int, dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.rows, self.dtype = layout, rows if layout.linear_layers else 0, dtype
        self._free = list(range(self.rows - 1, -1, -1))
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def needed(self) -> bool:
        """Whether the model has linear layers at all."""
        return bool(self.layout.linear_layers)

    @property
    def free(self) -> int:
        """Rows without an owner."""
        return len(self._free)

    @property
    def padding_row(self) -> int:
        """The row of sequences that only fill up a batch."""
        return self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of all states; 0 before the first prefill, which tells their shapes."""
        return sum(t.numel() * t.element_size() for pair in self._states.values() for t in pair)

    def allocate(self) -> int:
        """Take a free row.

        Raises:
            EngineError: none is free; the scheduler asks before it takes.
        """
        if not self._free:
            raise EngineError(f"all {self.rows} rows of linear-attention state are in use")
        return self._free.pop()

    def release(self, row: int) -> None:
        """Give a row back."""
        if row in self._free or not 0 <= row < self.rows:
            raise EngineError(f"row {row} of linear-attention state is not in use")
        self._free.append(row)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the states of rows ``source (n,)`` to rows ``target (n,)``."""
        for pair in self._states.values():
            for tensor in pair:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """States of a gated delta net by row: ``(rows, K, C)`` inputs, ``(rows, Hv, Dk, Dv)`` matrices.

        Raises:
            EngineError: nothing was prefilled yet.
        """
        if layer not in self._states:
            raise EngineError(f"layer {layer} has no linear-attention state before the first prefill")
        return self._states[layer]

    def moved(self, *, decode: bool) -> tuple[int, ...]:
        """Linear layers whose states a forward pass gathers and scatters; in a decode step the others keep them."""
        return tuple(i for i in self.layout.linear_layers if not (decode and i in self.layout.deltas))

    def gather(self, rows: Tensor | None, layers: tuple[int, ...]) -> Cache:
        """Build the cache object of one forward pass.

        Args:
            rows: ``(B,)`` int64, rows to continue from; ``None`` starts from nothing.
            layers: linear layers that get their states; those of other linear layers are empty.
        """
        made: list[Any] = []
        for index in range(self.layout.num_layers):
            if index not in self.layout.linear_layers:
                made.append(PassThrough())
                continue
            layer = LinearAttentionLayer()
            if rows is not None and index in layers:
                conv, recurrent = (state.index_select(0, rows) for state in self._states[index])
                _continue(layer, self._turned(index, conv), recurrent.float())
            made.append(layer)
        return EngineCache(layers=made)

    def scatter(self, cache: Cache, rows: Tensor, layers: tuple[int, ...]) -> None:
        """Store the states that a forward pass left in ``cache`` for ``layers`` into rows ``(B,)``."""
        for index in layers:
            layer: Any = cache.layers[index]
            found = (self._turned(index, layer.conv_states[0]), layer.recurrent_states[0].to(self.dtype))
            if index not in self._states:
                # The first forward pass tells shapes; the model knows them better than a configuration.
                conv, recurrent = (t.new_zeros(self.rows + 1, *t.shape[1:]) for t in found)
                self._states[index] = (conv, recurrent)
            for pool, state in zip(self._states[index], found, strict=True):
                pool.index_copy_(0, rows, state)

    def _turned(self, layer: int, conv: Tensor) -> Tensor:
        """Inputs of a convolution, channels first, as transformers has them, to taps first, or back."""
        return conv.transpose(1, 2).contiguous() if layer in self.layout.deltas else conv


def _continue(layer: Any, conv: Tensor, recurrent: Tensor) -> None:
    """Put given states into a fresh cache layer, as an earlier forward pass would have left them."""
    layer.dtype, layer.device = conv.dtype, conv.device
    layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent
    layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
    layer.conv_kernel_size[0] = conv.shape[-1]
    layer.has_previous_state[0] = True


def cache_keyword(decoder: torch.nn.Module) -> str:
    """Name of the decoder's cache argument: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    import inspect

    names = inspect.signature(type(decoder).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
