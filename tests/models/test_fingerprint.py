"""Fingerprints: a function of the bytes alone, and any change shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.guidance.codec import check_keys
from tracefp4.models.fingerprint import fingerprint
from tracefp4.models.packing import digest

GPU = torch.cuda.is_available()


def by_hand(data: bytes) -> int:
    """The definition in Python's integers."""
    book = [int(k) | 1 for k in check_keys(65536 // 16 + 17).flatten()[: 65536 + 257].tolist()]
    words = np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()
    total = 0
    for first in range(0, max(len(words), 1), 1 << 24):
        slab = words[first : first + (1 << 24)]
        total = total * book[-1] + sum(book[j % 65536] * book[65536 + j // 65536] * w for j, w in enumerate(slab))
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total


@given(st.binary(max_size=70))
@settings(max_examples=30, deadline=None)
def test_short_tensors_by_hand(data):
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    assert int(fingerprint(tensor)) == by_hand(data)


@pytest.mark.parametrize("size", [65536, 65537, 200_001])
def test_more_than_a_tile_by_hand(size):
    x = torch.randint(-(2**31), 2**31 - 1, (size,), generator=torch.Generator().manual_seed(size)).to(torch.int32)
    assert int(fingerprint(x)) == by_hand(x.numpy().tobytes())


def test_more_than_a_slab():
    x = torch.zeros((1 << 24) + 3, dtype=torch.int32)
    x[0], x[-1] = 3, 5
    book = [int(k) | 1 for k in check_keys(65536 // 16 + 17).flatten()[: 65536 + 257].tolist()]
    assert int(fingerprint(x)) % (1 << 64) == (3 * book[0] * book[65536] * book[-1] + 5 * book[2] * book[65536]) % (
        1 << 64
    )


def test_views_and_dtypes_count_as_their_bytes():
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert fingerprint(x) == fingerprint(x.view(torch.int16)) == fingerprint(x.t().contiguous().t())
    flat = x.flatten().view(torch.uint8)
    assert fingerprint(flat[1:41]) == fingerprint(flat[1:41].clone())


@given(st.integers(0, 399), st.integers(0, 399))
@settings(max_examples=30, deadline=None)
def test_a_changed_bit_and_a_swap_show(i, j):
    x = torch.randint(0, 256, (400,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    y, z = x.clone(), x.clone()
    y[i] ^= 1 << (j % 8)
    z[i], z[j] = x[j], x[i]
    assert fingerprint(x) != fingerprint(y)
    assert (fingerprint(x) == fingerprint(z)) == bool(x[i] == x[j])


def test_names_shapes_and_dtypes_enter_the_digest():
    x = torch.arange(8, dtype=torch.float32)
    seen = {digest({"a": (x,)}), digest({"b": (x,)}), digest({"a": (x.view(2, 4),)}), digest({"a": (x.int(),)})}
    assert len(seen | {digest({"a": (x.view(torch.int32),)}), digest({"a": (x, x)})}) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_devices_agree():
    x = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert int(fingerprint(x)) == int(fingerprint(x.cuda()))
    assert digest({"a": (x,), "b": (x,)}) == digest({"a": (x.cuda(),), "b": (x,)})
