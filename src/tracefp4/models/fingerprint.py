"""A 64-bit fingerprint of a tensor, computed where the tensor lies.

After every step two sides prove that they serve equal weights. A checksum on the host would first have to bring
gigabytes there, which takes longer than the step. So each tensor becomes one number on its own device::

    h = sum of  key(j) * word(j)   mod 2^64

``word(j)`` are its bytes, four at a time, as signed 32-bit integers. Such a multilinear hash (Carter and Wegman 1979;
Lemire and Kaser, "Strongly universal string hashing is fast", 2014) needs no order, so it is the same number on every
device. All keys are odd, so one changed word always changes it; several cancel with a chance of about ``2^-64``. It
guards against accidents. Whoever wants two tensors to collide can make them.

Keys come from SplitMix64 (:func:`tracefp4.guidance.codec.check_keys`). Words are taken in tiles of 65,536; a key is the
product of that of the word in its tile and that of the tile in its slab of 256, and slabs are joined by Horner's rule.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tracefp4.formats.tables import on_device
from tracefp4.guidance.codec import check_keys, wider
from tracefp4.kernels.runtime import usable

_TILE = 1 << 16
_TILES = 1 << 8
"""Tiles of a slab."""


def fingerprint(tensor: Tensor) -> Tensor:
    """The fingerprint of a tensor's bytes, an int64 scalar on its device; dtype and shape do not enter.

    Args:
        tensor: any dtype and shape. Bytes that do not fill a last word count as if zeros followed.
    """
    words = _words(tensor.detach())
    book = on_device(fingerprint_keys, words.device)
    lane, tile = book[:_TILE], book[_TILE : _TILE + _TILES]
    if usable(words):
        from tracefp4.kernels.fingerprint import weigh

        slabs = weigh(words, lane, tile).unbind()
    else:
        slabs = [_slab(slab, lane, tile) for slab in words.split(_TILE * _TILES)]
    total = slabs[0]
    for slab in slabs[1:]:
        total = total * book[-1] + slab
    return total


def _slab(words: Tensor, lane: Tensor, tile: Tensor) -> Tensor:
    whole = words.numel() // _TILE
    tiles = words[: whole * _TILE].view(whole, _TILE)
    if words.device.type == "cpu":  # NumPy adds up as it multiplies, several times faster than PyTorch here
        sums = torch.from_numpy(np.einsum("tl,l->t", tiles.numpy(), lane.numpy()))
    else:
        sums = (tiles * lane).sum(1)
    total = (sums * tile[:whole]).sum()
    rest = words[whole * _TILE :]
    return total + (rest * lane[: rest.numel()]).sum() * tile[whole] if rest.numel() else total


def _words(tensor: Tensor) -> Tensor:
    """Its bytes as int32 words ``(n,)``."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    over = data.numel() % 4
    return wider(torch.nn.functional.pad(data, (0, 4 - over)) if over else data, torch.int32)


def fingerprint_keys() -> Tensor:
    """Keys of the words of a tile, of the tiles of a slab and one for slabs, all odd: int64 ``(65536 + 256 + 1,)``."""
    return check_keys(_TILE // 16 + _TILES // 16 + 1).flatten()[: _TILE + _TILES + 1] | 1
