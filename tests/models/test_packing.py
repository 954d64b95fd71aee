"""Packed weights and the checksum that proves them: the same strings as ever."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats.blocks import quantize_weight
from tracefp4.formats.spec import get_spec
from tracefp4.kernels.runtime import interpreted
from tracefp4.models.packing import PackedWeight, digest, pack_weight, weight_operand

KNOWN = {
    "nvfp4-te": ("af2dfcc6b002468d0d14680c1acc8dae", "4dbe7bcbb23abdb816755c7390851568"),
    "nvfp4-pow2": ("4df26684e928993c97ce742236b19959", "a1a2edd1c355298924654fc82bd8675a"),
    "mxfp4-ceil": ("2cc5f6097ba00ff72c9334c761168348", "491d5040dc57a02c8d85094d80ca9855"),
}
"""Checksums of :func:`weight` as it lies, and of its first rows transposed."""


def weight() -> torch.Tensor:
    """Three matrices of different sizes, with blocks of zeros, computed without a random generator."""
    w = ((torch.arange(3 * 48 * 128) * 2654435761 % 4096 - 2048).float() / 512).view(3, 48, 128)
    w[1] *= 0.01
    w[2, :, :64] = 0
    return w.bfloat16()


def numerics_of(name: str):
    return get_spec("mxfp4-w4a4-kv4" if name.startswith("mx") else "nvfp4-w4a4-kv4", name).weights


@pytest.mark.parametrize("name", KNOWN)
def test_checksums_are_those_of_earlier_releases(name):
    n, w = numerics_of(name), weight()
    found = digest({"a": pack_weight(w, n).parts(), "b": pack_weight(w, n).parts(), "c": (w,)})
    assert (found, digest({"t": pack_weight(w[:, :32], n, transposed=True).parts()})) == KNOWN[name]


@pytest.mark.parametrize("name", KNOWN)
def test_a_weight_is_packed_as_it_is_quantized(name):
    n, w = numerics_of(name), weight()
    expected = PackedWeight.of(quantize_weight(w, n))
    for found, other in zip(pack_weight(w, n).parts(), expected.parts(), strict=True):
        assert torch.equal(found, other)


def test_a_matrix_is_no_stacked_weight():
    with pytest.raises(FormatError, match="stacked weights"):
        pack_weight(weight()[0], numerics_of("nvfp4-te"))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_an_operand_without_codes_is_that_of_the_codes(name, kernels, device):
    n, w = numerics_of(name), weight().to(device)
    with interpreted() if kernels and device.type == "cpu" else nullcontext():
        expected = pack_weight(w, n).operand()
        into = torch.full_like(w, float("nan"))
        for transposed, given in ((False, None), (False, into), (True, into)):
            matrix = w.transpose(1, 2).contiguous() if transposed else w
            found = weight_operand(matrix, n, transposed=transposed, into=given)
            assert found.packed is None and torch.equal(found.values, expected.values)
            assert (found.scale is None) == (expected.scale is None)
            assert found.scale is None or torch.equal(found.scale, expected.scale)
            if not transposed and given is not None and (kernels or device.type == "cuda"):
                assert found.values.data_ptr() == into.data_ptr()
    with pytest.raises(FormatError, match="stacked weights"):
        weight_operand(w[0], n)
