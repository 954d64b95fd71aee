from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracefp4.errors import FormatError
from tracefp4.formats import blocks, e2m1
from tracefp4.formats.numerics import NUMERICS, get_numerics
from tracefp4.quantizers import stats
from tracefp4.quantizers.guided import DECODERS, Outcome, choose, quantize_guided
from tracefp4.quantizers.nearest import quantize_nearest

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CELLS = tuple(itertools.pairwise((-0.25, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, math.inf)))
CHOICES = [(bits, decoder) for bits in (1, 2, 3, 4) for decoder in DECODERS if decoder != "replay" or bits == 4]

values = st.one_of(
    st.floats(-6, 6, width=32),
    st.sampled_from([s * v for s in (1.0, -1.0) for v in (*GRID, 1.75, 2.25, 2.5, 3.375, 3.75, 4.25, 4.5, 1e-30)]),
)


def value_of(code: int) -> float:
    return -GRID[code & 7] if code & 8 else GRID[code]


def ends(z: float) -> tuple[int, int]:
    """Magnitude indices of the bracket, from the definition."""
    size = abs(z)
    if size in GRID[:-1]:
        return GRID.index(size), GRID.index(size)
    lower = max(k for k in range(7) if GRID[k] <= size)
    return lower, lower + 1


def definition(z: float, low: int, bits: int, decoder: str) -> int:
    """The code that section 3 of the design names, one value at a time."""
    sign = 8 if math.copysign(1, z) < 0 else 0
    if decoder == "replay" or (decoder != "bracket" and bits == 4):
        return low
    size = abs(z)
    congruent = [k for k in range(8) if k % 2**bits == low]
    if decoder == "nearest":
        return sign + min(congruent, key=lambda k: (abs(GRID[k] - size), k))
    if decoder == "map":
        return sign + min(congruent, key=lambda k: (max(CELLS[k][0] - size, size - CELLS[k][1], 0.0), k))
    lower, upper = ends(z)
    if lower == upper:
        return sign + lower
    if bits == 4:
        named = min((lower, upper), key=lambda k: abs(value_of(sign + k) - value_of(low)))
    elif bits == 3:
        named = min((lower, upper), key=lambda k: abs(GRID[k] - GRID[low]))
    elif lower % 2**bits == low or upper % 2**bits == low:
        named = lower if lower % 2**bits == low else upper
    else:
        nearest = min(congruent, key=lambda k: (abs(GRID[k] - size), k))
        named = min(max(nearest, lower), upper)
    return sign + named


def one(z: float, low: int, bits: int, decoder: str = "bracket") -> int:
    return choose(torch.tensor([z]), torch.tensor([low], dtype=torch.uint8), bits, decoder).item()


@pytest.mark.parametrize(("bits", "decoder"), CHOICES)
def test_every_choice_equals_the_definition(bits, decoder, device):
    """All bfloat16 values in [-6, 6], among them every threshold of every decoder, and all recorded bits."""
    z = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    z = z[(z.abs() <= 6) & ((z.abs() > 0.01) | (z.abs() < 1e-39))]
    for low in range(2**bits):
        recorded = torch.full(z.shape, low, dtype=torch.uint8)
        got = choose(z.to(device), recorded.to(device), bits, decoder).tolist()
        assert got == [definition(v, low, bits, decoder) for v in z.tolist()]


@settings(max_examples=400)
@given(values, st.integers(0, 15), st.sampled_from(CHOICES))
def test_any_value_equals_the_definition(z, code, choice):
    bits, decoder = choice
    low = code % 2**bits
    assert one(z, low, bits, decoder) == definition(z, low, bits, decoder)


@given(values, st.integers(0, 15))
def test_four_bits_never_end_farther_from_the_rollout_than_plain_rounding(z, recorded):
    q = value_of(one(z, recorded, 4))
    plain = value_of(e2m1.encode(torch.tensor([z])).item())
    assert abs(q - value_of(recorded)) <= abs(plain - value_of(recorded))


@given(values, st.integers(0, 15), st.integers(1, 4))
def test_the_bracket_decoder_stays_in_the_bracket(z, recorded, bits):
    code = one(z, recorded % 2**bits, bits)
    assert code & 7 in ends(z)
    assert code & 8 == (8 if math.copysign(1, z) < 0 else 0)


@given(values, st.integers(0, 1))
def test_one_bit_names_one_of_two_distinct_ends(z, low):
    lower, upper = ends(z)
    code = one(z, low, 1)
    assert code % 2 == low or lower == upper


@given(values, st.integers(1, 4), st.integers(-1, 1))
def test_a_rollout_code_at_an_end_of_the_bracket_is_recovered_whole(z, bits, side):
    """The case that the method lives from: rollout and trainer lie in the same bracket. Any number of bits suffices."""
    lower, upper = ends(z)
    recorded = (lower if side < 0 else upper) + (8 if math.copysign(1, z) < 0 else 0)
    assert one(z, recorded % 2**bits, bits) == recorded


@given(st.sampled_from(GRID[:-1]), st.booleans(), st.integers(0, 15), st.integers(1, 4))
def test_on_an_inner_grid_point_nothing_moves(size, negative, recorded, bits):
    z = -size if negative else size
    assert one(z, recorded % 2**bits, bits) == GRID.index(size) + 8 * negative


def test_six_is_no_inner_grid_point():
    assert [one(6.0, low, 1) for low in (0, 1)] == [6, 7]
    assert [one(-6.0, low, 1) for low in (0, 1)] == [14, 15]
    assert [one(6.0, low, 2) for low in range(4)] == [6, 6, 6, 7]


def test_two_bits_project_the_nearest_congruent_magnitude():
    # Between 3 and 4 (indices 5 and 6) a recorded 3 means 1.5 or 6; below 3.75 the first is nearer, above the second.
    assert [one(z, 3, 2) for z in (3.5, 3.75, 3.76)] == [5, 5, 6]
    # Between 1 and 1.5 a recorded 0 means 0 or 2; both ends of that bracket are above the middle of 0 and 2.
    assert [one(z, 0, 2) for z in (1.01, 1.49)] == [3, 3]
    # Between 0 and 0.5 a recorded 3 means 1.5 or 6.
    assert one(0.1, 3, 2) == 1


def test_three_bits_take_the_sign_of_z():
    assert [one(z, 3, 3) for z in (0.1, -0.1)] == [1, 9]


def test_decoders_differ_where_published():
    """For one bit, the nearest odd magnitude is 1.5 up to 2.25 and 3 up to 4.5; by cells 2.125 and 4.25."""
    z = [2.0625, 2.1875, 2.3, 4.125, 4.375, 4.6]
    assert [one(v, 1, 1, "bracket") for v in z] == [5, 5, 5, 7, 7, 7]
    assert [one(v, 1, 1, "nearest") for v in z] == [3, 3, 5, 5, 5, 7]
    assert [one(v, 1, 1, "map") for v in z] == [3, 5, 5, 5, 7, 7]


@given(values, st.integers(0, 15))
def test_replay_returns_the_recorded_code(z, recorded):
    assert one(z, recorded, 4, "replay") == recorded


def pair(seed: int, noise: float, rows: int = 16, width: int = 128) -> tuple[Tensor, Tensor]:
    """The rollout's and the trainer's values of the same tokens, bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))
    return x.bfloat16(), (x * (1 + noise * torch.randn(rows, width, generator=generator))).bfloat16()


def outcome(q: blocks.Quantized, bits: int, scale_bits: int = 8) -> Outcome:
    scales = q.scales if scale_bits == 8 else q.scales & (2**scale_bits - 1)
    return Outcome(q.codes & (2**bits - 1), scales, q.global_scale, bits, scale_bits)


FP4 = [n for n in NUMERICS if n != "mxfp8"]


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_small_noise_is_removed_completely(name, bits, device):
    n = get_numerics(name)
    rollout, trainer = (x.to(device) for x in pair(0, 0.004))
    q = quantize_nearest(rollout, n)
    guided = quantize_guided(trainer, outcome(q, bits), n)
    assert not stats.wrong_codes(guided.codes, q.codes).any()
    assert torch.equal(guided.dequantize(), q.dequantize())
    own = quantize_nearest(trainer, n)
    assert not torch.equal(own.dequantize(), q.dequantize())


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("scale_bits", [2, 3])
def test_congruent_scales_restore_the_whole_bytes(name, scale_bits, device):
    n = get_numerics(name)
    rollout, trainer = (x.to(device) for x in pair(1, 0.02))
    q = quantize_nearest(rollout, n)
    guided = quantize_guided(trainer, outcome(q, 1, scale_bits), n)
    whole = quantize_guided(trainer, outcome(q, 1), n)
    assert torch.equal(guided.scales, q.scales)
    assert torch.equal(guided.codes, whole.codes)


def test_own_scales_under_congruence_use_the_rollouts_global_scale():
    n = get_numerics("nvfp4-te")
    rollout, trainer = pair(2, 0.01)
    trainer = trainer.clone()
    trainer[:, 0] = 40 * rollout.abs().amax(-1)  # the trainer's own global scale would be far off
    q = quantize_nearest(rollout, n)
    guided = quantize_guided(trainer, outcome(q, 1, 3), n)
    assert torch.equal(guided.scales[:, 1:], q.scales[:, 1:])
    assert torch.equal(guided.global_scale, q.global_scale)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_rollout_scale_of_zero_gives_zero(decoder, device):
    n = get_numerics("nvfp4-te")
    _, trainer = (x.to(device) for x in pair(3, 0.01))
    scales = torch.full((16, 8), 56, dtype=torch.uint8, device=device)
    scales[:, 3] = 0
    low = torch.full(trainer.shape, 15, dtype=torch.uint8, device=device)
    g = torch.ones(16, 1, device=device)
    guided = quantize_guided(trainer, Outcome(low, scales, g, 4), n, decoder)
    assert (guided.codes[:, 48:64] == 0).all()
    assert (guided.dequantize()[:, 48:64] == 0).all()
    assert guided.dequantize().isfinite().all()


def test_values_far_outside_the_rollouts_range_clip_to_the_last_bracket():
    n = get_numerics("nvfp4-te")
    x = torch.full((1, 16), 1e30)
    x[0, 1] = float("inf")
    x[0, 2] = float("-inf")
    g, scales = torch.ones(1, 1), torch.full((1, 1), 56, dtype=torch.uint8)
    for low, want in ((0, 6), (1, 7)):
        recorded = torch.full((1, 16), low, dtype=torch.uint8)
        codes = quantize_guided(x, Outcome(recorded, scales, g, 1), n).codes[0]
        assert codes.tolist() == [want, want, want + 8] + [want] * 13


@pytest.mark.parametrize("name", FP4)
def test_a_nan_of_the_trainer_is_not_hidden(name, device):
    n = get_numerics(name)
    rollout, trainer = (x.to(device) for x in pair(4, 0.01))
    q = quantize_nearest(rollout, n)
    trainer = trainer.clone()
    trainer[5, 70] = float("nan")
    guided = quantize_guided(trainer, outcome(q, 4), n)
    values = guided.dequantize().unflatten(-1, (-1, n.block))
    assert values[5, 70 // n.block].isnan().all()
    assert values.isnan().sum() == n.block


def test_a_nan_of_the_rollout_stays_one():
    n = get_numerics("nvfp4-te")
    rollout, trainer = pair(5, 0.01)
    rollout = rollout.clone()
    rollout[2, 17] = float("nan")
    q = quantize_nearest(rollout, n)
    guided = quantize_guided(trainer, outcome(q, 1), n)
    assert guided.dequantize()[2, 16:32].isnan().all()
    assert guided.dequantize().isnan().sum() == 16


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.0, 0.3), st.sampled_from(CHOICES), st.sampled_from(FP4))
def test_a_row_depends_on_nothing_but_itself(seed, noise, choice, name):
    bits, decoder = choice
    n = get_numerics(name)
    if n.scope == "tensor":
        n = replace(n, scope="token")
    rollout, trainer = pair(seed, noise, rows=5, width=64)
    o = outcome(quantize_nearest(rollout, n), bits, 3)
    whole = quantize_guided(trainer, o, n, decoder)
    for row in range(5):
        r = slice(row, row + 1)
        g = None if o.global_scale is None else o.global_scale[r]
        alone = quantize_guided(trainer[r], Outcome(o.low[r], o.scales[r], g, bits, 3), n, decoder)
        assert torch.equal(alone.codes[0], whole.codes[row])
        assert torch.equal(alone.scales[0], whole.scales[row])


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "decoder"), CHOICES)
def test_cuda_equals_cpu(bits, decoder):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for name in FP4:
        n = get_numerics(name)
        rollout, trainer = pair(6, 0.05, rows=256, width=512)
        o = outcome(quantize_nearest(rollout, n), bits, 3)
        g = None if o.global_scale is None else o.global_scale.cuda()
        cpu = quantize_guided(trainer, o, n, decoder)
        cuda = quantize_guided(trainer.cuda(), Outcome(o.low.cuda(), o.scales.cuda(), g, bits, 3), n, decoder)
        assert torch.equal(cuda.codes.cpu(), cpu.codes)
        assert torch.equal(cuda.scales.cpu(), cpu.scales)
        assert torch.equal(cuda.operand().cpu(), cpu.operand())
        assert torch.equal(cuda.dequantize(torch.bfloat16).cpu(), cpu.dequantize(torch.bfloat16))


def test_refusals_say_what_is_wrong():
    n = get_numerics("nvfp4-te")
    rollout, trainer = pair(7, 0.01)
    q = quantize_nearest(rollout, n)
    good = outcome(q, 1)
    with pytest.raises(FormatError, match="did you mean 'bracket'"):
        quantize_guided(trainer, good, n, "brackt")
    with pytest.raises(FormatError, match="'replay' needs whole codes"):
        quantize_guided(trainer, good, n, "replay")
    with pytest.raises(FormatError, match="1 to 4 bits"):
        choose(torch.zeros(2), torch.zeros(2, dtype=torch.uint8), 5)
    with pytest.raises(FormatError, match="one shape"):
        choose(torch.zeros(2), torch.zeros(3, dtype=torch.uint8), 1)
    with pytest.raises(FormatError, match="does not fit values"):
        quantize_guided(trainer[:, :64], good, n)
    with pytest.raises(FormatError, match="2, 3 or 8 bits"):
        quantize_guided(trainer, replace(good, scale_bits=5), n)
    with pytest.raises(FormatError, match="without global scales"):
        quantize_guided(trainer, replace(good, global_scale=None), n)
