from __future__ import annotations

import pytest
import torch

from tracefp4.formats import blocks
from tracefp4.formats.numerics import get_numerics
from tracefp4.quantizers import stats
from tracefp4.quantizers.base import Quantizer
from tracefp4.quantizers.nearest import quantize_nearest

N = get_numerics("nvfp4-te")


def test_flips_compare_the_kept_bits_of_plain_rounding():
    z = torch.tensor([0.1, 0.4, -0.1, 2.4, 5.5])  # codes 0, 1, 8, 4, 7
    recorded = torch.tensor([8, 1, 0, 5, 6], dtype=torch.uint8)
    assert stats.flips(z, recorded, 4, N).tolist() == [False, False, False, True, True]
    assert stats.flips(z, recorded & 1, 1, N).tolist() == [False, False, False, True, True]
    assert stats.flip_rate(z, recorded & 7, 3, N).item() == pytest.approx(0.4)


def test_the_sign_of_zero_is_no_wrong_code():
    codes = torch.tensor([0, 8, 1, 9, 0], dtype=torch.uint8)
    recorded = torch.tensor([8, 0, 9, 9, 1], dtype=torch.uint8)
    assert stats.wrong_codes(codes, recorded).tolist() == [False, False, True, False, True]
    assert stats.wrong_code_rate(codes, recorded).item() == pytest.approx(0.4)


def test_scale_mismatch_compares_the_kept_bits():
    own = torch.tensor([8, 9, 10, 11], dtype=torch.uint8)
    recorded = torch.tensor([8, 1, 2, 3], dtype=torch.uint8)
    assert stats.scale_mismatch(own, recorded).item() == 0.75
    assert stats.scale_mismatch(own, recorded & 3, 2).item() == 0.0


def test_statistics_stay_on_the_device(device):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device)
    q = quantize_nearest(x, N)
    z = blocks.normalize(x, q.scales, q.global_scale, N)
    for value in (
        stats.flip_rate(z, q.codes & 1, 1, N),
        stats.wrong_code_rate(q.codes, q.codes),
        stats.scale_mismatch(q.scales, q.scales),
    ):
        assert value.ndim == 0 and value.device.type == device.type
    assert stats.flip_rate(z, q.codes, 4, N).item() == 0.0


def test_nearest_is_a_quantizer():
    quantizer: Quantizer = quantize_nearest
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    g = blocks.global_scale(x, N)
    assert torch.equal(quantizer(x, N).codes, quantizer(x, N, g).codes)
