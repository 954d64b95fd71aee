"""Linear-attention state: what hybrid models (Qwen3-Next, Qwen3.5-MoE) keep instead of K and V.

A gated delta net keeps two tensors of constant size a sequence and layer: the last inputs of a short convolution and a
recurrent matrix. They are never quantized. A *row* of the pool holds the states of one sequence in all linear layers. A
forward pass gathers the rows of its batch into a cache object that transformers understands, and scatters them back
afterwards; a prompt that several samples share hands each of them a copy of the state at its end.

The same cache object serves every model: where a layer has softmax attention it passes K and V through untouched,
because the attention site keeps them in the KV pool. Its presence also tells transformers to build no masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from tracefp4.errors import EngineError
from tracefp4.models.layout import ModelLayout


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


class StatePool:
    """States of all sequences, by row. Row ``rows`` is for padding and never handed out.

    Args:
        layout: which layers are linear.
        rows: rows that may be handed out.
    """

    def __init__(self, layout: ModelLayout, rows: int) -> None:
        self.layout, self.rows = layout, rows if layout.linear_layers else 0
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

    def gather(self, rows: Tensor | None) -> Cache:
        """Build the cache object of one forward pass.

        Args:
            rows: ``(B,)`` int64, rows to continue from; ``None`` starts from nothing.
        """
        linear = set(self.layout.linear_layers)
        layers: list[Any] = []
        for index in range(self.layout.num_layers):
            if index not in linear:
                layers.append(PassThrough())
                continue
            layer = LinearAttentionLayer()
            if rows is not None:
                conv, recurrent = self._states[index]
                _continue(layer, conv.index_select(0, rows), recurrent.index_select(0, rows))
            layers.append(layer)
        return EngineCache(layers=layers)

    def scatter(self, cache: Cache, rows: Tensor) -> None:
        """Store the states that a forward pass left in ``cache`` into rows ``(B,)``."""
        for index in self.layout.linear_layers:
            layer: Any = cache.layers[index]
            found: tuple[Tensor, Tensor] = (layer.conv_states[0], layer.recurrent_states[0])
            if index not in self._states:
                # The first forward pass tells shapes and dtypes; the model knows them better than a configuration.
                conv, recurrent = (t.new_zeros(self.rows + 1, *t.shape[1:]) for t in found)
                self._states[index] = (conv, recurrent)
            for pool, state in zip(self._states[index], found, strict=True):
                pool.index_copy_(0, rows, state)


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
