"""Rows times a number each: the bits of PyTorch's product."""

import pytest
import torch

from tracefp4.kernels.row_scale import scale_rows


@pytest.mark.parametrize("shape", [(5, 16), (3, 2100), (1, 1), (67, 576)])
def test_bits_of_the_product_rounded_once(shape, device):
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator).bfloat16().to(device)
    scale = torch.rand(shape[0], 1, generator=generator).to(device) + 0.1
    assert torch.equal(scale_rows(x, scale), (x.float() * scale).bfloat16())
