"""Bit planes and scale checks, against definitions written value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.errors import FormatError
from tracefp4.guidance.codec import (
    CHUNK,
    check_keys,
    clean_padding,
    code_checks,
    pack_bits,
    pack_scales,
    scale_bytes,
    scale_checks,
    unpack_bits,
    unpack_scales,
)


def random_bytes(seed: int, shape: tuple[int, ...], high: int = 256) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8))


def slow_planes(vector: list[int], bits: int) -> list[int]:
    out = []
    for b in range(bits):
        plane = bytearray(len(vector) // 8)
        for i, value in enumerate(vector):
            plane[i // 8] |= (value >> b & 1) << (i % 8)
        out += list(plane)
    return out


def slow_check(rows: list[list[int]], valid: list[bool]) -> int:
    keys = [[int(k) % 2**64 for k in row] for row in check_keys(-(-len(rows[0]) // 4)).tolist()]
    total = 0
    for t, row in enumerate(rows):
        if valid[t]:
            padded = row + [0] * (-len(row) % 4)
            for j in range(len(padded) // 4):
                total += keys[t][j] * int.from_bytes(bytes(padded[4 * j : 4 * j + 4]), "little")
    return (total % 2**64) >> 32


@given(bits=st.integers(1, 4), words=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_planes_follow_their_definition(bits: int, words: int, seed: int) -> None:
    codes = random_bytes(seed, (3, 8 * words), 16)
    packed = pack_bits(codes, bits)
    assert packed.tolist() == [slow_planes(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack_bits(packed, bits, 8 * words), codes & ((1 << bits) - 1))


@given(bits=st.integers(1, 4), lead=st.lists(st.integers(0, 3), max_size=3), words=st.integers(1, 4), data=st.data())
def test_planes_of_any_shape(bits: int, lead: list[int], words: int, data: st.DataObject) -> None:
    codes = random_bytes(data.draw(st.integers(0, 2**32 - 1)), (*lead, 8 * words), 16)
    packed = pack_bits(codes, bits)
    assert packed.shape == (*lead, bits * words)
    assert torch.equal(unpack_bits(packed, bits, 8 * words), codes & ((1 << bits) - 1))


def test_every_byte_survives(device: torch.device) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=device)
    planes = unpack_bits(every[:, None].contiguous(), 1, 8)
    assert torch.equal(pack_bits(planes, 1)[:, 0], every)
    assert torch.equal(unpack_bits(pack_bits(every, 8), 8, 256), every)


def test_fewer_bits_are_a_prefix(device: torch.device) -> None:
    codes = random_bytes(1, (5, 2, 64), 16).to(device)
    for bits in (1, 2, 3):
        assert torch.equal(pack_bits(codes, 4)[..., : bits * 8], pack_bits(codes, bits))


def test_planes_of_slices_and_transposes(device: torch.device) -> None:
    codes = random_bytes(2, (40, 67), 16).to(device)
    for view in (codes[:, 3:67], codes[1:, 1:41], codes.T[:, :40], codes.flatten()[3:43]):
        assert torch.equal(unpack_bits(pack_bits(view, 4), 4, view.shape[-1]), view)


def test_planes_on_both_devices_are_equal(device: torch.device) -> None:
    codes, scales = random_bytes(3, (7, 3, 256), 16), random_bytes(4, (70, 11))
    assert torch.equal(pack_bits(codes.to(device), 3).cpu(), pack_bits(codes, 3))
    assert torch.equal(scale_checks(scales.to(device)).cpu(), scale_checks(scales))


@given(bits=st.sampled_from([2, 3, 8]), blocks=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_scales_round_trip(bits: int, blocks: int, seed: int) -> None:
    scales = random_bytes(seed, (4, 2, blocks), 127)
    packed = pack_scales(scales, bits)
    assert packed.shape == (4, 2, scale_bytes(blocks, bits))
    kept = scales if bits == 8 else scales & (2**bits - 1)
    assert torch.equal(unpack_scales(packed, bits, blocks), kept)
    assert clean_padding(packed, bits, blocks)
    assert torch.equal(pack_scales(kept, bits), packed)


def test_scale_layout_by_hand() -> None:
    # Ten scales in 3 bits: planes of two bytes, six unused bits at the top of each second byte.
    scales = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 127, 120]], dtype=torch.uint8)
    assert pack_scales(scales, 3).tolist() == [[0b10101010, 0b01, 0b11001100, 0b01, 0b11110000, 0b01]]


@pytest.mark.parametrize("bits", [2, 3])
def test_unused_bits_must_be_zero(bits: int) -> None:
    packed = pack_scales(random_bytes(5, (2, 3, 5)), bits)
    for plane in range(bits):
        for bit in range(5, 8):
            dirty = packed.clone()
            dirty[1, 2, plane] |= 1 << bit
            assert not clean_padding(dirty, bits, 5)


@given(rows=st.integers(1, 50), n=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_checks_follow_their_definition(rows: int, n: int, seed: int) -> None:
    scales, valid = random_bytes(seed, (rows, n)), random_bytes(seed + 1, (rows,), 2).bool()
    expected = [
        slow_check(scales[s : s + CHUNK].tolist(), valid[s : s + CHUNK].tolist()) for s in range(0, rows, CHUNK)
    ]
    assert [c % 2**32 for c in scale_checks(scales, valid).tolist()] == expected


def test_keys_are_those_of_the_frame_format() -> None:
    mask = 2**64 - 1
    for t, row in enumerate(check_keys(5).tolist()):
        for j, key in enumerate(row):
            z = (t * 2**32 + j + 1) * 0x9E3779B97F4A7C15 & mask
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
            assert key & mask == z ^ z >> 31


def test_checks_do_not_depend_on_the_batch(device: torch.device) -> None:
    scales = random_bytes(6, (3, 40, 6)).to(device)
    lengths = torch.tensor([40, 17, 5], device=device)
    valid = torch.arange(40, device=device) < lengths[:, None]
    together = scale_checks(scales, valid)
    assert together.shape == (3, 3)
    for b, length in enumerate(lengths.tolist()):
        alone = scale_checks(scales[b, :length])
        assert torch.equal(together[b, : len(alone)], alone)
        assert not together[b, len(alone) :].any()


def test_every_single_change_is_seen() -> None:
    scales = random_bytes(7, (CHUNK, 12))
    clean = scale_checks(scales)
    changed = scales.repeat(CHUNK * 12 * 255, 1, 1)
    index = torch.arange(CHUNK * 12 * 255)
    place, step = index // 255, (index % 255 + 1).to(torch.uint8)
    changed.view(len(index), -1)[index, place] += step
    assert (scale_checks(changed) != clean).all()


def test_wrong_neighbours_are_seen() -> None:
    # What a wrong restoration looks like: bytes off by a multiple of 8, here and there.
    rng = np.random.default_rng(8)
    scales = random_bytes(9, (20_000, CHUNK, 8), 100)
    errors = torch.from_numpy((rng.random(scales.shape) < 0.02).astype(np.uint8)) * 8
    touched = errors.flatten(1).any(1)
    assert touched.any()
    assert torch.equal((scale_checks(scales + errors) != scale_checks(scales))[:, 0], touched)


def test_swapped_tokens_are_seen() -> None:
    scales = random_bytes(10, (CHUNK, 8))
    swapped = scales.clone()
    swapped[[3, 4]] = scales[[4, 3]]
    shifted = scales.roll(1, 0)
    assert not torch.equal(scale_checks(swapped), scale_checks(scales))
    assert not torch.equal(scale_checks(shifted), scale_checks(scales))


@given(rows=st.integers(1, 20), n=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_checks_of_codes_are_those_of_a_chunk_of_one_token(rows: int, n: int, seed: int) -> None:
    planes, valid = random_bytes(seed, (rows, n)), random_bytes(seed + 1, (rows,), 2).bool()
    expected = [slow_check([row], [bool(known)]) for row, known in zip(planes.tolist(), valid, strict=True)]
    assert [c % 2**32 for c in code_checks(planes, valid).tolist()] == expected


@pytest.mark.parametrize("n", [1, 8, 72, 1024])
def test_every_flip_of_one_bit_is_seen(n: int) -> None:
    planes = random_bytes(12, (1, n))
    flipped = planes.repeat(8 * n, 1)
    index = torch.arange(8 * n)
    flipped[index, index // 8] ^= (1 << index % 8).to(torch.uint8)
    assert (code_checks(flipped) != code_checks(planes)).all()


@given(n=st.integers(1, 300), flips=st.integers(2, 60), seed=st.integers(0, 2**32 - 1))
def test_flips_of_many_bits_are_seen(n: int, flips: int, seed: int) -> None:
    planes = random_bytes(seed, (50, n))
    places = torch.from_numpy(np.random.default_rng(seed).integers(0, 8 * n, (50, flips)))
    changes = torch.zeros(50, 8 * n, dtype=torch.uint8).scatter_(1, places, 1)
    changed = planes ^ pack_bits(changes, 1)
    assert ((code_checks(changed) != code_checks(planes)) == changes.any(1)).all()


def test_checks_of_codes_know_the_order() -> None:
    planes = random_bytes(13, (200, 64))
    words = planes.unflatten(1, (16, 4))
    for other in (words.roll(1, 1), words.flip(1), words[:, [1, 0, *range(2, 16)]], words.flip(2)):
        assert (code_checks(other.flatten(1)) != code_checks(planes)).all()
    assert (code_checks(planes.roll(1, 0)) != code_checks(planes)).all()


def test_checks_of_codes_on_both_devices_are_equal(device: torch.device) -> None:
    planes = random_bytes(14, (3, 70, 11))
    assert torch.equal(code_checks(planes.to(device)).cpu(), code_checks(planes))


def test_refused_input() -> None:
    good = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(FormatError, match="multiple of 8"):
        pack_bits(torch.zeros(2, 12, dtype=torch.uint8), 1)
    with pytest.raises(FormatError, match="uint8"):
        pack_bits(good.int(), 1)
    with pytest.raises(FormatError, match="1 to 8 bits"):
        pack_bits(good, 0)
    with pytest.raises(FormatError, match="2 planes of 32 values"):
        unpack_bits(good, 2, 32)
    with pytest.raises(FormatError, match=r"8 bits \(whole\), 3 or 2"):
        pack_scales(good, 4)
    with pytest.raises(FormatError, match="10 scales in 3 bits"):
        unpack_scales(good, 3, 10)
    with pytest.raises(FormatError, match="scale checks"):
        scale_checks(good.int())
    with pytest.raises(FormatError, match="code checks"):
        code_checks(good[0])


def test_axes_of_size_one_may_have_any_stride() -> None:
    """PyTorch calls such tensors contiguous; a view in a wider dtype wants every stride to be a multiple."""
    data = random_bytes(11, (400,), 16)
    for shape, stride in [((1, 32), (7, 1)), ((3, 1, 16), (16, 5, 1)), ((1, 2, 1, 8), (3, 8, 99, 1))]:
        odd = torch.as_strided(data, shape, stride)
        assert odd.is_contiguous()
        plain = torch.tensor(odd.tolist(), dtype=torch.uint8)
        assert torch.equal(pack_bits(odd, 3), pack_bits(plain, 3))
        assert torch.equal(scale_checks(odd), scale_checks(plain))
