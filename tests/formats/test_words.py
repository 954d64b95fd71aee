"""The layout for GPUs without FP4 is a bijection, and its patterns are the numbers that it promises."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats import e2m1, e4m3, words


def test_words_hold_codes():
    codes = torch.randint(0, 16, (3, 5, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = words.to_words(codes)
    assert packed.shape == (3, 5, 48) and packed.dtype == torch.int16
    assert torch.equal(words.from_words(packed), codes)


def test_every_word_is_used():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(-1, 16)
    assert torch.equal(words.to_words(words.from_words(every)), every)


def test_packed_codes_become_the_words_of_their_codes_and_again_packed():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(4, 16, -1)
    packed = e2m1.pack(words.from_words(every))
    assert torch.equal(words.of_packed(packed), every) and torch.equal(words.to_packed(every), packed)
    rows = torch.randint(0, 256, (3, 5, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    made = words.of_packed(rows[:, ::2])
    assert torch.equal(made, words.to_words(e2m1.unpack(rows[:, ::2]))) and made.dtype == torch.int16
    assert torch.equal(words.to_packed(made.transpose(0, 1)), rows[:, ::2].transpose(0, 1))


def test_a_masked_word_is_a_bfloat16():
    codes = torch.arange(16, dtype=torch.uint8)
    first = words.to_words(codes.repeat(4)).to(torch.int32) & 0x81C0
    value = first.to(torch.int16).view(torch.bfloat16).double() * 2.0**126
    assert torch.equal(value.float(), e2m1.decode(codes))


def test_scales_are_recoded_one_to_one():
    data = torch.arange(128, dtype=torch.uint8)
    code = words.recode(data)
    assert code.unique().numel() == 128
    assert torch.equal(words.restore(code), data)
    pattern = ((code.to(torch.int32) << 4) + 0x7680).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(pattern[1:127].double(), e4m3.decode(data[1:127]).double() * 2.0**119)
    assert pattern[0].isfinite() and pattern[127].isnan()


def test_lifted_scales_need_one_multiplication():
    data = torch.tensor([0, 3, 90, 120, 121, 80], dtype=torch.uint8)
    used = torch.tensor([False, False, True, True, True, True])
    # The second matrix has smaller scales: each is lifted by itself.
    both = words.lift(torch.stack([data, data.clamp(max=100)]).view(2, 2, 3), torch.stack([used, used]).view(2, 2, 3))
    assert all(part.shape[0] == 2 for part in both) and both[0].shape == (2, 2, 3) and both[2].all()
    alone = words.lift(data.clamp(max=100)[None], used[None])
    assert torch.equal(both[0][1].flatten(), alone[0][0]) and both[1][1] == alone[1][0] != both[1][0]
    lifted, factor = both[0][0].flatten(), both[1][0]
    pattern = (lifted.to(torch.int32) << 7).to(torch.int16).view(torch.bfloat16)
    assert pattern.isfinite().all()
    raw = (torch.arange(8) << 6).to(torch.int16).view(torch.bfloat16)  # codes 0..7 times 2^-126
    product = (raw[:, None] * pattern[None, used]).double() * factor.double()
    codes = e2m1.decode(torch.arange(8, dtype=torch.uint8)).double()
    assert torch.equal(product, codes[:, None] * 2.0 ** (data[used].double() - 127))


@pytest.mark.parametrize("data", [[255, 100], [230, 90]])
def test_scales_that_cannot_be_lifted(data):
    data = torch.tensor([data, data], dtype=torch.uint8)
    used = torch.tensor([[True, True], [False, True]])  # a block of zeros may have any scale
    assert words.lift(data, used)[2].tolist() == [False, True]


def test_refuses_what_does_not_fit():
    with pytest.raises(FormatError, match="multiple of 64"):
        words.to_words(torch.zeros(2, 32, dtype=torch.uint8))
    with pytest.raises(FormatError, match="multiple of 64"):
        words.of_packed(torch.zeros(2, 48, dtype=torch.uint8))
