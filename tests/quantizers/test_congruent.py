from __future__ import annotations

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.quantizers.congruent import LARGEST_E8M0, restore_scales


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("largest", [126, LARGEST_E8M0])
def test_every_byte_and_residue_equals_the_definition(bits, largest, device):
    own = torch.arange(largest + 1, dtype=torch.uint8).repeat_interleave(2**bits)
    low = torch.arange(2**bits, dtype=torch.uint8).repeat(largest + 1)
    got = restore_scales(own.to(device), low.to(device), bits, largest).tolist()
    for o, r, byte in zip(own.tolist(), low.tolist(), got, strict=True):
        congruent = range(r, largest + 1, 2**bits)
        assert byte == min(congruent, key=lambda b: (abs(b - o), b))


@pytest.mark.parametrize("bits", [2, 3])
def test_a_byte_is_restored_from_any_own_byte_within_half_a_period(bits):
    true = torch.arange(127, dtype=torch.int16)
    for shift in range(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)):
        own = true + shift
        keep = (own >= 0) & (own <= 126)
        low = true[keep].to(torch.uint8) & (2**bits - 1)
        assert torch.equal(restore_scales(own[keep].to(torch.uint8), low, bits), true[keep].to(torch.uint8))


def test_a_tie_goes_to_the_smaller_byte():
    assert restore_scales(torch.tensor([50], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8), 2).item() == 48
    assert restore_scales(torch.tensor([1], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8), 2).item() == 3


def test_a_nan_byte_of_the_trainer_counts_as_the_largest():
    assert restore_scales(torch.tensor([127], dtype=torch.uint8), torch.tensor([6], dtype=torch.uint8), 3).item() == 126


def test_refusals_say_what_is_wrong():
    data = torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(FormatError, match="2 or 3 bits, got 8"):
        restore_scales(data, data, 8)
    with pytest.raises(FormatError, match="uint8"):
        restore_scales(data, data.float(), 2)
