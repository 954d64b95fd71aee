"""Packed tensors widen to exactly what their codes stand for."""

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats.blocks import quantize
from tracefp4.formats.numerics import get_numerics
from tracefp4.formats.packed import Packed


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-pow2", "mxfp4-ceil", "sglang-kv-nvfp4"])
def test_widening_is_exact_and_small(name):
    n = get_numerics(name)
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5)[:, None, None]
    x[0, 0, :32] = 0.0
    x[1, 1, 5] = float("nan")
    q = quantize(x.bfloat16(), n)
    packed = Packed.of(q)
    torch.testing.assert_close(packed.operand(), q.operand(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(packed.operand(torch.float32).bfloat16(), q.operand(), rtol=0, atol=0, equal_nan=True)
    for dtype in (torch.bfloat16, torch.float32):
        found = packed.values(q.decode_scale(), dtype)
        torch.testing.assert_close(found, q.dequantize(dtype), rtol=0, atol=0, equal_nan=True)
    assert packed.codes.nbytes + packed.scales.nbytes == x.numel() * (0.5 + 1 / n.block)


def test_eight_bit_elements_have_no_packed_form():
    with pytest.raises(FormatError, match="two a byte"):
        Packed.of(quantize(torch.ones(2, 32), get_numerics("mxfp8")))
