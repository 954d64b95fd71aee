"""Experts that an engine keeps in NVFP4 itself, read back as the trainer would pack them.

An engine with FP4 kernels loads codes, block scales and one global scale for each projection, and rearranges them for
its kernel: rows of gate and up moved, scales tiled, everything padded. The checksum of a sync is taken over packed
weights in plain order, so :class:`StoredWeight` undoes the arrangement, and what comes out is compared bit for bit with
what the trainer packs. Padding has to be zero: it takes part in the kernel's products.

The global scale travels in one of two forms (:mod:`tracefp4.formats.numerics`). ModelOpt's checkpoints hold what a
product is multiplied by, compressed-tensors' what values are multiplied by. One is not recovered from the other bit for
bit, so a form that is not the numerics' own is refused, and so are gate and up with two different global scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tracefp4.errors import SyncError
from tracefp4.formats.numerics import Numerics
from tracefp4.integrations.engines.layouts import PLAIN, Rows, from_matrix_view, linear_scales
from tracefp4.models.packing import PackedWeight

Scales = Literal["linear", "tiled", "matrix view"]
"""Block scales row by row; in tiles; or tiles under CuteDSL's six axes."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One expert projection as an engine keeps it."""

    codes: Tensor
    """``(E, padded rows, padded columns / 2)``, one byte an element."""
    scales: Tensor
    """``(E, padded rows, padded columns / 16)`` one byte an element, or in the layout of :attr:`arranged`."""
    global_scale: Tensor
    """``(E,)``, or ``(E, 2)`` for gate and up."""
    form: Literal["encode", "decode"]
    """Of the global scale."""
    rows: Rows = PLAIN
    arranged: Scales = "linear"

    def packed(self, name: str, shape: tuple[int, ...], numerics: Numerics) -> PackedWeight:
        """As :func:`tracefp4.models.packing.pack_weight` returns it.

        Args:
            name: of the parameter, for the sentence of an error.
            shape: ``(E, out, in)`` of the trainer's parameter.
            numerics: of the spec's weights.

        Raises:
            SyncError: padding that is not zero, or global scales that cannot be compared.
        """
        experts, out, width = shape
        if self.codes.shape[0] != experts or self.codes.shape[2] * 2 < width:
            raise SyncError(f"{name!r} has shape {shape}, the engine keeps codes {tuple(self.codes.shape)}")
        codes = self._cut(name, self.codes.view(torch.uint8), out, width // 2)
        scales = self._cut(name, self._linear(), out, width // numerics.block)
        return PackedWeight(codes, scales, self._global(name, numerics), numerics)

    def _linear(self) -> Tensor:
        """Scales ``(E, padded rows, padded blocks)`` uint8, row by row."""
        if self.arranged == "linear":
            return self.scales.view(torch.uint8)
        tiled = from_matrix_view(self.scales) if self.arranged == "matrix view" else self.scales.view(torch.uint8)
        rows, blocks = self.codes.shape[1], self.codes.shape[2] // 8
        return torch.stack([linear_scales(part, rows, blocks) for part in tiled])

    def _cut(self, name: str, stored: Tensor, rows: int, columns: int) -> Tensor:
        plain = self.rows.undo(stored, rows)[:, :, :columns].contiguous()
        if plain.count_nonzero() != stored.count_nonzero():
            raise SyncError(f"{name!r}: the engine's padding is not zero; this is another release's layout")
        return plain

    def _global(self, name: str, numerics: Numerics) -> Tensor:
        if self.form != numerics.global_form or numerics.scope != "tensor":
            raise SyncError(
                f"{name!r}: the engine keeps {self.form} scales of whole tensors, {numerics.name!r} another kind; the "
                "checksum needs a spec of nvfp4-modelopt (decode) or nvfp4-ct (encode)"
            )
        scale = self.global_scale.detach().float()
        if scale.ndim == 2:
            if not torch.equal(scale[:, 0], scale[:, -1]):
                raise SyncError(f"{name!r}: gate and up have two global scales; they must share one")
            scale = scale[:, 0]
        return scale.reshape(-1, 1, 1).contiguous()
