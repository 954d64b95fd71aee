"""Records: packing, unpacking, cutting rows and cutting plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import ConfigError, GuidanceError, GuidanceMismatch
from tracefp4.formats.numerics import get_numerics
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import SiteRecord, restrict, token_hash
from tracefp4.quantizers.guided import quantize_guided
from tracefp4.quantizers.nearest import quantize_nearest

SHAPE = SiteShape(Site(2, Kind.EXPERTS_MID), 3, 48, 16, True)


def draw(rows: int, shape: SiteShape = SHAPE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, shape.vectors, shape.width), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, 127, (rows, shape.vectors, shape.width // shape.block), generator=g, dtype=torch.uint8)
    return codes, scales, torch.rand(rows, shape.vectors, generator=g)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("scale_bits", [8, 3, 2])
def test_outcome_is_what_was_packed(bits: int, scale_bits: int) -> None:
    codes, scales, wide = draw(20)
    site = SiteRecord.pack(SHAPE, codes, scales, wide, bits, scale_bits)
    assert (site.bits, site.scale_bits, site.rows) == (bits, scale_bits, 20)
    outcome = site.outcome()
    kept = scales if scale_bits == 8 else scales & (2**scale_bits - 1)
    assert torch.equal(outcome.low, codes.flatten(0, 1) & ((1 << bits) - 1))
    assert torch.equal(outcome.scales, kept.flatten(0, 1))
    assert outcome.global_scale is not None
    assert torch.equal(outcome.global_scale, wide.reshape(-1, 1))
    assert (outcome.bits, outcome.scale_bits) == (bits, scale_bits)


def test_outcome_of_chosen_vectors() -> None:
    site = SiteRecord.pack(SHAPE, *draw(20), 2, 3)
    rows = torch.tensor([59, 0, 7, 7])
    some, every = site.outcome(rows), site.outcome()
    assert torch.equal(some.low, every.low[rows])
    assert torch.equal(some.scales, every.scales[rows])
    assert some.global_scale is not None and every.global_scale is not None
    assert torch.equal(some.global_scale, every.global_scale[rows])


def test_no_rows() -> None:
    site = SiteRecord.pack(SHAPE, *draw(0), 1, 3)
    assert site.outcome().low.shape == (0, 48)
    assert site.outcome(torch.zeros(0, dtype=torch.int64)).scales.shape == (0, 3)
    assert site.checks is not None and site.checks.shape == (0,)


@pytest.mark.parametrize("scale_bits", [8, 3])
def test_a_recorded_quantization_guides_an_equal_value_to_itself(scale_bits: int) -> None:
    numerics = get_numerics("nvfp4-te")
    x = torch.randn(24, 3, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    theirs = quantize_nearest(x, numerics)
    assert theirs.global_scale is not None
    site = SiteRecord.pack(SHAPE, theirs.codes, theirs.scales, theirs.global_scale[..., 0], 1, scale_bits)
    ours = quantize_guided(x.flatten(0, 1), site.outcome(), numerics)
    assert torch.equal(ours.codes, theirs.codes.flatten(0, 1))
    assert torch.equal(ours.scales, theirs.scales.flatten(0, 1))
    if scale_bits != 8:
        assert not site.misses(ours.scales.view(24, 3, 3)).any()


def test_misses_name_the_chunk() -> None:
    codes, scales, wide = draw(40)
    valid = torch.ones(40, dtype=torch.bool)
    valid[35] = False
    site = SiteRecord.pack(SHAPE, codes, scales, wide, 1, 3, valid)
    assert site.misses(scales, valid).tolist() == [False, False, False]
    wrong = scales.clone()
    wrong[20, 1, 2] ^= 8
    wrong[35] = 0
    assert site.misses(wrong, valid).tolist() == [False, True, False]
    with pytest.raises(GuidanceError, match="no checks"):
        SiteRecord.pack(SHAPE, codes, scales, wide, 1).misses(scales)
    with pytest.raises(GuidanceError, match=r"has scales \(40, 3, 3\), got \(39, 3, 3\)"):
        site.misses(scales[:39])


def test_slices_of_rows() -> None:
    codes, scales, wide = draw(40)
    site = SiteRecord.pack(SHAPE, codes, scales, wide, 2, 3)
    for start, stop in ((0, 40), (16, 32), (32, 40), (16, 16)):
        part = site.slice(start, stop)
        again = SiteRecord.pack(SHAPE, codes[start:stop], scales[start:stop], wide[start:stop], 2, 3)
        for name in ("planes", "scales", "global_scale", "checks"):
            assert torch.equal(getattr(part, name), getattr(again, name))
    assert site.slice(3, 9, checks=False).checks is None
    assert site.slice(0, 40).planes.data_ptr() == site.planes.data_ptr()
    with pytest.raises(GuidanceError, match="take 0 to 16, or checks=False"):
        site.slice(3, 9)
    with pytest.raises(GuidanceError, match="not within the 40 rows"):
        site.slice(0, 41)


@pytest.mark.parametrize("plan", ["r1-l1/s3", "r2-all+mid/s8", "r4-all+mid/s8", "r3-all:kv/s2", "r1-all:mid/s2"])
def test_a_cut_record_equals_one_recorded_under_the_smaller_plan(plan: str, make, small_shapes) -> None:
    whole = make("r4-all+mid/s8", small_shapes, range(40), num_layers=2, absent=[7, 20])
    cut = restrict(whole, Plan.parse(plan), small_shapes, 2)
    assert cut.plan == plan
    assert list(cut.sites) == [s.site for s in Plan.parse(plan).select(small_shapes, 2)]
    parsed = Plan.parse(plan)
    for site, part in cut.sites.items():
        full = whole.sites[site]
        outcome, shape = full.outcome(), full.shape
        wide = None if outcome.global_scale is None else outcome.global_scale.view(39, -1)
        codes, scales = outcome.low.view(39, shape.vectors, -1), outcome.scales.view(39, shape.vectors, -1)
        same = SiteRecord.pack(shape, codes, scales, wide, parsed.bits, parsed.scale_bits, whole.valid)
        for name in ("planes", "scales", "global_scale", "checks"):
            mine, theirs = getattr(part, name), getattr(same, name)
            assert mine is theirs is None or torch.equal(mine, theirs)


def test_a_record_cannot_be_cut_to_what_it_lacks(make, small_shapes) -> None:
    record = make("r1-all/s8", small_shapes, range(5))
    with pytest.raises(GuidanceError, match="has 1 bits a code and 8 a scale; 2 and 8 cannot"):
        restrict(record, Plan.parse("r2-all/s8"), small_shapes, 2)
    with pytest.raises(GuidanceError, match=r"needs site 0\.experts_mid, a record of 'r1-all/s8' lacks it"):
        restrict(record, Plan.parse("r1-all+mid/s8"), small_shapes, 2)
    congruent = make("r1-all/s2", small_shapes, range(5))
    with pytest.raises(GuidanceError, match="cannot be made"):
        restrict(congruent, Plan.parse("r1-all/s3"), small_shapes, 2)
    other = (SiteShape(Site(0, Kind.EXPERTS_IN), 1, 96, 16, True),)
    with pytest.raises(GuidanceMismatch, match="width=96"):
        restrict(record, Plan.parse("r1-all/s8"), other, 2)
    with pytest.raises(ConfigError, match="covers 5 layers"):
        restrict(record, Plan.parse("r1-l5"), small_shapes, 2)


def test_from_three_bit_scales_to_two_keeps_the_checks(make, small_shapes) -> None:
    three = make("r1-all+mid/s3", small_shapes, range(40), seed=5)
    two = make("r1-all+mid/s2", small_shapes, range(40), seed=5)
    cut = restrict(three, Plan.parse("r1-all+mid/s2"), small_shapes, 2)
    for site, part in cut.sites.items():
        assert torch.equal(part.scales, two.sites[site].scales)
        assert torch.equal(part.checks, two.sites[site].checks)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=30))
def test_token_hash_is_of_little_endian_int32(tokens: list[int]) -> None:
    expected = xxhash.xxh3_128_hexdigest(b"".join(t.to_bytes(4, "little") for t in tokens))
    assert token_hash(tokens) == expected
    assert token_hash(torch.tensor(tokens, dtype=torch.int64)) == expected
    assert token_hash(np.array(tokens, dtype=np.int32)) == expected
    assert token_hash(tuple(tokens)) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**31], [[1, 2]], [1.5], ["a"]])
def test_what_is_no_token(tokens: list) -> None:
    with pytest.raises(GuidanceError, match="token ids"):
        token_hash(tokens)


def test_bytes_and_coverage(small) -> None:
    assert small.coverage == pytest.approx(17 / 19)
    counted = small.valid.nbytes + small.routes.nbytes
    for site in small.sites.values():
        counted += site.planes.nbytes + site.scales.nbytes + site.checks.nbytes
        counted += 0 if site.global_scale is None else site.global_scale.nbytes
    assert small.nbytes == counted


@pytest.mark.gpu
def test_to_the_device_and_back(small) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    there = small.to("cuda")
    for site, part in there.sites.items():
        assert torch.equal(part.outcome().low.cpu(), small.sites[site].outcome().low)
        assert torch.equal(part.to("cpu").checks, small.sites[site].checks)
    assert there.routes is not None and there.routes.is_cuda
