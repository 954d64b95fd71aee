"""Guided rounding on the E4M3 grid, against a slow second implementation, and what it does for MXFP8."""

import itertools

import pytest
import torch

from tracefp4.formats import e4m3
from tracefp4.formats.blocks import quantize
from tracefp4.formats.numerics import get_numerics
from tracefp4.quantizers import stats
from tracefp4.quantizers.guided import Outcome, choose_eight, quantize_guided
from tracefp4.quantizers.nearest import quantize_nearest

GRID = [float(v) for v in e4m3.decode(torch.arange(127, dtype=torch.uint8))]
MXFP8 = get_numerics("mxfp8")


def reference(z, low, bits, decoder):
    """One value at a time, from the definitions, in double precision."""
    size = min(abs(z), 448.0)
    lower = max(k for k in range(127) if GRID[k] <= size)
    upper = lower if GRID[lower] == size else lower + 1
    if size == 448.0:
        lower, upper = 125, 126
    candidates = [k for k in range(127) if k % 2**bits == low]
    if decoder == "map":

        def distance(k):
            start = (GRID[k - 1] + GRID[k]) / 2 if k else -1e9
            stop = (GRID[k] + GRID[k + 1]) / 2 if k < 126 else 1e9
            return max(start - size, size - stop, 0.0)
    else:

        def distance(k):
            return abs(GRID[k] - size)

    best = min(candidates, key=lambda k: (distance(k), k))
    if decoder == "bracket":
        if upper % 2**bits == low:
            best = upper
        elif lower % 2**bits == low:
            best = lower
        best = min(max(best, lower), upper)
    return best + (128 if z < 0 else 0)


@pytest.mark.parametrize("decoder", ["bracket", "nearest", "map"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_equals_the_reference(bits, decoder, device):
    generator = torch.Generator().manual_seed(bits)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(GRID)]
    random = (torch.randn(400, generator=generator) * torch.exp(2 * torch.randn(400, generator=generator))).tolist()
    z = torch.tensor([*GRID, *middles, *(m * 1.001 for m in middles), *random, 448.0, 500.0, 2.0**-11])
    z = torch.cat([z, -z[z != 0]])
    for low in range(2**bits):
        recorded = torch.full(z.shape, low, dtype=torch.uint8)
        found = choose_eight(z.to(device), recorded.to(device), bits, decoder).cpu().tolist()
        expected = [reference(v, low, bits, decoder) for v in z.tolist()]
        wrong = [(v, a, b) for v, a, b in zip(z.tolist(), found, expected, strict=True) if a != b]
        assert not wrong, wrong[:3]


def test_replay_is_the_nearest_congruent_byte():
    z, low = torch.tensor([1.0, 1.3, -7.0]), torch.tensor([9, 3, 15], dtype=torch.uint8)
    assert torch.equal(choose_eight(z, low, 4, "replay"), choose_eight(z, low, 4, "nearest"))


def pair(noise, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 128, generator=g) * torch.exp(torch.randn(16, 1, generator=g))
    return x.bfloat16(), (x * (1 + noise * torch.randn(16, 128, generator=g))).bfloat16()


@pytest.mark.parametrize("scale_bits", [8, 3])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_small_noise_is_removed_completely(bits, scale_bits, device):
    rollout, trainer = (x.to(device) for x in pair(0.004))
    q = quantize_nearest(rollout, MXFP8)
    scales = q.scales if scale_bits == 8 else q.scales & (2**scale_bits - 1)
    low = q.codes & (2**bits - 1)
    guided = quantize_guided(trainer, Outcome(low, scales, None, bits, scale_bits), MXFP8)
    assert torch.equal(guided.scales, q.scales)
    assert torch.equal(guided.dequantize(), q.dequantize())
    assert not stats.wrong_codes(guided.codes, low, bits, "e4m3").any()
    own = quantize(trainer, MXFP8)
    assert not torch.equal(own.dequantize(), q.dequantize())
    assert stats.flip_rate(trainer.float() / 1, low, bits, MXFP8) > 0


def test_one_bit_fails_only_where_the_two_sides_are_more_than_a_step_apart():
    rollout, trainer = pair(0.3, seed=1)
    q = quantize_nearest(rollout, MXFP8)
    one, four = (
        quantize_guided(trainer, Outcome(q.codes & (2**b - 1), q.scales, None, b), MXFP8).dequantize() for b in (1, 4)
    )
    truth = q.dequantize()
    assert (four - truth).norm() < (one - truth).norm()


def test_a_nan_marks_its_block():
    rollout, trainer = pair(0.01)
    trainer = trainer.clone()
    trainer[3, 40] = float("nan")
    q = quantize_nearest(rollout, MXFP8)
    values = quantize_guided(trainer, Outcome(q.codes & 1, q.scales, None, 1), MXFP8).dequantize()
    assert values[3, 32:64].isnan().all() and values.isnan().sum() == 32


def test_a_nan_has_no_sign():
    """Devices disagree about the sign of a NaN that they compute, so no code may show it."""
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all() and nan.signbit().tolist() == [False, True]
    assert e4m3.encode(nan).tolist() == [127, 127]
    for bits in (1, 2, 3, 4):
        low = torch.zeros(2, dtype=torch.uint8)
        first, second = choose_eight(nan, low, bits).tolist()
        assert first == second == choose_eight(torch.tensor([448.0]), low[:1], bits).item()
