"""Frames: what encode writes, decode gives back; what belongs to something else is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.core import Kind, Site, SiteShape
from tracefp4.errors import GuidanceError, GuidanceMismatch, GuidanceStale
from tracefp4.guidance import frame as module
from tracefp4.guidance.frame import Expectation, decode, encode
from tracefp4.guidance.header import checksum_of
from tracefp4.guidance.plan import ALL_KINDS, Plan
from tracefp4.guidance.record import Record

TOKENS = range(100, 120)


def assert_equal(a: Record, b: Record) -> None:
    for name in ("plan", "token_hash", "numerics_hash", "weight_version", "rows"):
        assert getattr(a, name) == getattr(b, name)
    assert torch.equal(a.valid, b.valid)
    assert (a.routes is None) == (b.routes is None)
    if a.routes is not None and b.routes is not None:
        assert a.routes.dtype == b.routes.dtype
        assert torch.equal(a.routes, b.routes)
    assert sorted(a.sites) == sorted(b.sites)
    for site, part in a.sites.items():
        other = b.sites[site]
        assert (part.shape, part.bits, part.scale_bits) == (other.shape, other.bits, other.scale_bits)
        for field in ("planes", "scales", "global_scale", "checks", "code_checks"):
            mine, theirs = getattr(part, field), getattr(other, field)
            assert mine is theirs is None or torch.equal(mine, theirs)


@st.composite
def site_shapes(draw: st.DrawFn) -> tuple[SiteShape, ...]:
    sites = draw(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ALL_KINDS)), min_size=1, max_size=6, unique=True)
    )
    return tuple(
        SiteShape(
            Site(layer, kind),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 5)) * 32,
            draw(st.sampled_from([16, 32])),
            draw(st.booleans()),
        )
        for layer, kind in sites
    )


@given(
    shapes=site_shapes(),
    rows=st.integers(0, 40),
    bits=st.integers(1, 4),
    scale_bits=st.sampled_from([8, 3, 2]),
    routes=st.none() | st.tuples(st.sampled_from([torch.uint8, torch.int16]), st.integers(1, 4), st.integers(1, 4)),
    absent=st.sets(st.integers(0, 39)),
    weight_version=st.integers(0, 2**63 - 1),
    checked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(
    make: Callable[..., Record], shapes, rows, bits, scale_bits, routes, absent, weight_version, checked
) -> None:
    plan = str(Plan(bits, None, ALL_KINDS, scale_bits, checked=checked))
    record = make(
        plan,
        shapes,
        range(rows + 1),
        routes=routes,
        absent=[row for row in absent if row < rows],
        weight_version=weight_version,
    )
    frame = encode(record)
    again = decode(frame, Expectation(tokens=range(rows + 1), plan=plan, shapes=shapes))
    assert_equal(record, again)
    assert encode(again) == frame


def test_equal_records_give_equal_bytes(small: Record, make, small_shapes) -> None:
    frame = encode(small)
    backwards = replace(small, sites=dict(reversed(small.sites.items())))
    assert encode(backwards) == frame
    twin = make("r2-all+mid/s3", small_shapes, TOKENS, routes=(torch.int16, 2, 3), absent=[4, 17])
    assert encode(twin) == frame


def test_sections_are_aligned_and_shared(small: Record) -> None:
    frame = bytearray(encode(small))
    tensors = [t for part in decode(frame).sites.values() for t in (part.planes, part.scales, part.checks)]
    base = torch.frombuffer(frame, dtype=torch.uint8).data_ptr()
    for tensor in tensors:
        offset = tensor.data_ptr() - base
        assert offset % 64 == 0
        assert 0 < offset < len(frame)


@pytest.mark.filterwarnings("error")
def test_any_kind_of_buffer(small: Record) -> None:
    frame = encode(small)
    assert isinstance(frame, bytes)
    odd = bytearray(b"x" + frame)
    for buffer in (frame, bytearray(frame), memoryview(frame), memoryview(odd)[1:]):
        assert_equal(decode(buffer), small)
    with pytest.raises(GuidanceError, match="no contiguous buffer"):
        decode(memoryview(odd)[::2])


def test_a_record_outlives_its_buffer_variable(small: Record) -> None:
    record = decode(bytes(bytearray(encode(small))))
    filler = [bytearray(4096) for _ in range(64)]
    assert_equal(record, small)
    del filler


def test_non_contiguous_tensors_are_written_as_they_read(small: Record) -> None:
    site, part = next(iter(small.sites.items()))
    wide = torch.zeros(part.rows * 2, *part.planes.shape[1:], dtype=torch.uint8)
    wide[::2] = part.planes
    assert encode(replace(small, sites=small.sites | {site: replace(part, planes=wide[::2])})) == encode(small)


@pytest.mark.parametrize("rows", [1, 5])
def test_axes_of_size_one_may_have_any_stride(make, small_shapes, rows: int) -> None:
    """Such tensors count as contiguous, so ``contiguous()`` does not put their strides right."""
    record = make("r1-all/s8", [small_shapes[0]], range(rows + 1))
    site, part = next(iter(record.sites.items()))
    fields = {}
    for name in ("planes", "scales", "global_scale"):
        tensor = getattr(part, name)
        strides = [size if tensor.shape[i] > 1 else 7 for i, size in enumerate(tensor.stride())]
        fields[name] = torch.as_strided(tensor, tensor.shape, strides)
        assert fields[name].is_contiguous()
    assert encode(replace(record, sites={site: replace(part, **fields)})) == encode(record)


def test_routes_without_guidance(make) -> None:
    record = make("none", (), range(7), routes=(torch.uint8, 3, 2))
    assert_equal(decode(encode(record), Expectation(plan="none", routes=(3, 2))), record)


def test_no_rows(make, small_shapes) -> None:
    record = make("r1-all+mid/s3", small_shapes, [5], routes=(torch.uint8, 1, 1))
    assert_equal(decode(encode(record), Expectation(tokens=[5])), record)


@pytest.mark.parametrize("length", [19, 21])
def test_rows_one_short_or_long(small: Record, length: int) -> None:
    with pytest.raises(GuidanceMismatch, match=rf"has 19 rows, a sequence of {length} tokens has {length - 1}"):
        decode(encode(small), Expectation(tokens=range(100, 100 + length)))


@pytest.mark.parametrize(
    "tokens",
    [range(101, 121), range(99, 119), [*range(100, 119), 0], [0, *range(101, 120)], list(reversed(TOKENS)), [0] * 20],
    ids=["shifted", "shifted back", "last differs", "first differs", "reversed", "padding"],
)
def test_other_tokens(small: Record, tokens) -> None:
    decode(encode(small), Expectation(tokens=TOKENS))
    with pytest.raises(GuidanceMismatch, match=rf"tokens with hash {small.token_hash}, these have [0-9a-f]{{32}}"):
        decode(encode(small), Expectation(tokens=tokens))


def test_other_plan_or_numerics(small: Record) -> None:
    with pytest.raises(GuidanceMismatch, match="has plan 'r2-all\\+mid/s3', expected 'r1-all/s8'"):
        decode(encode(small), Expectation(plan="r1-all/s8"))
    with pytest.raises(GuidanceMismatch, match="numerics 0123456789abcdef, the trainer has f00d"):
        decode(encode(small), Expectation(numerics_hash="f00d"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, r"site 0\.experts_in: recorded 1 x 48 .*, expected 1 x 64"),
        ({"vectors": 2}, "expected 2 x 48"),
        ({"block": 8}, "expected 1 x 48 values in blocks of 8"),
        ({"token_scale": False}, "with a constant global scale"),
        ({"site": Site(5, Kind.EXPERTS_IN)}, r"site 0\.experts_in: recorded .*, expected nothing"),
    ],
)
def test_other_shapes(small: Record, small_shapes, change: dict, message: str) -> None:
    decode(encode(small), Expectation(shapes=tuple(reversed(small_shapes))))
    with pytest.raises(GuidanceMismatch, match=message):
        decode(encode(small), Expectation(shapes=(replace(small_shapes[0], **change), *small_shapes[1:])))


def test_missing_and_additional_sites(small: Record, small_shapes) -> None:
    with pytest.raises(GuidanceMismatch, match=r"site 0\.experts_in: recorded .*, expected nothing"):
        decode(encode(small), Expectation(shapes=small_shapes[1:]))
    more = (*small_shapes, SiteShape(Site(9, Kind.K), 1, 32, 16, False))
    with pytest.raises(GuidanceMismatch, match=r"site 9\.k: recorded nothing, expected 1 x 32"):
        decode(encode(small), Expectation(shapes=more))


def test_routes_that_were_expected(small: Record, make, small_shapes) -> None:
    decode(encode(small), Expectation(routes=(2, 3)))
    with pytest.raises(GuidanceMismatch, match="routes of 2 layers and top 3, expected 2 layers and top 4"):
        decode(encode(small), Expectation(routes=(2, 4)))
    with pytest.raises(GuidanceMismatch, match="no routes, expected 2 layers"):
        decode(encode(make("r1-all/s8", small_shapes, TOKENS)), Expectation(routes=(2, 3)))


@pytest.mark.parametrize(
    ("version", "lag", "fits"), [(3, 0, True), (4, 1, True), (4, 0, False), (6, 2, False), (2, 5, False)]
)
def test_weight_versions(small: Record, version: int, lag: int, fits: bool) -> None:
    expect = Expectation(weight_version=version, max_lag=lag)
    if fits:
        assert decode(encode(small), expect).weight_version == 3
        return
    with pytest.raises(GuidanceStale, match=f"weights 3, the trainer has {version}"):
        decode(encode(small), expect)


def test_messages_name_the_sample(small: Record) -> None:
    with pytest.raises(GuidanceMismatch, match=r"^sample 7 of prompt-3 has plan"):
        decode(encode(small), Expectation(plan="r1-all/s8"), label="sample 7 of prompt-3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "r2-al"}, "did you mean 'r2-all'"),
        ({"plan": "r1-all+mid/s3"}, "has 2 bits a code and 3 a scale, plan 'r1-all\\+mid/s3' 1 and 3"),
        ({"plan": "r2-all/s3"}, "has no such kind of site"),
        ({"token_hash": "abc"}, "token hash has 32 hex"),
        ({"numerics_hash": ""}, "numerics hash has 1 to 64"),
        ({"weight_version": -1}, "weight version lies in"),
        ({"rows": 18, "routes": None}, r"valid is torch.bool \(19,\), expected torch.bool \(18,\)"),
        ({"valid": torch.ones(19)}, "valid is torch.float32"),
        ({"routes": torch.zeros(19, 2, 3, dtype=torch.int64)}, "routes are torch.int64"),
        ({"routes": torch.zeros(18, 2, 3, dtype=torch.uint8)}, "expected uint8 or int16"),
        ({"sites": {}}, "with 0 sites"),
    ],
)
def test_records_that_do_not_fit_together(small: Record, change: dict, message: str) -> None:
    with pytest.raises(GuidanceError, match=message):
        encode(replace(small, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": torch.zeros(18, 1, 12, dtype=torch.uint8)}, r"planes is torch.uint8 \(18, 1, 12\)"),
        ({"scales": torch.zeros(19, 1, 4, dtype=torch.uint8)}, r"expected torch.uint8 \(19, 1, 3\)"),
        ({"scales": torch.full((19, 1, 3), 255, dtype=torch.uint8)}, "unused bits of its packed scales"),
        ({"global_scale": None}, "global_scale is missing"),
        ({"checks": None}, "checks is missing"),
        ({"checks": torch.zeros(1, dtype=torch.int32)}, r"expected torch.int32 \(2,\)"),
        ({"scale_bits": 8}, "and 8 a scale"),
        ({"shape": SiteShape(Site(3, Kind.EXPERTS_IN), 1, 48, 16, True)}, "under 0.experts_in"),
    ],
)
def test_sites_that_do_not_fit(small: Record, change: dict, message: str) -> None:
    site = Site(0, Kind.EXPERTS_IN)
    with pytest.raises(GuidanceError, match=message):
        encode(replace(small, sites=small.sites | {site: replace(small.sites[site], **change)}))


def test_no_python_work_for_a_row(make, small_shapes) -> None:
    """Encoding and decoding call about as many functions for 10 rows as for 10 000."""

    def calls(action: Callable[[], object]) -> int:
        count = 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        action()
        sys.setprofile(profile)
        try:
            action()
        finally:
            sys.setprofile(None)
        return count

    few, many = (make("r1-all+mid/s3", small_shapes, range(n + 1)) for n in (10, 10_000))
    assert abs(calls(lambda: encode(few)) - calls(lambda: encode(many))) < 20
    short, long = encode(few), encode(many)
    assert abs(calls(lambda: decode(short)) - calls(lambda: decode(long))) < 20


@pytest.mark.gpu
def test_frames_of_device_tensors_are_equal(small: Record) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert encode(small.to("cuda")) == encode(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": torch.zeros(19, 1, 6, dtype=torch.uint8)}, r"has 1 bits a code .* 'c1-all\+mid/s2' 0 and 2"),
        ({"code_checks": None}, "code_checks is missing"),
        ({"code_checks": torch.zeros(2, dtype=torch.int32)}, r"code_checks is torch.int32 \(2,\), expected .* \(19,\)"),
    ],
)
def test_checked_sites_that_do_not_fit(checked: Record, change: dict, message: str) -> None:
    site = Site(0, Kind.EXPERTS_IN)
    with pytest.raises(GuidanceError, match=message):
        encode(replace(checked, sites=checked.sites | {site: replace(checked.sites[site], **change)}))
    with pytest.raises(GuidanceError, match="0 bits a code"):
        encode(replace(checked, plan="r1-all+mid/s2"))


def _outcome(frame: bytes, expect: Expectation) -> object:
    try:
        record = decode(frame, expect, label="sample")
    except GuidanceError as error:
        return type(error), str(error)
    parts = {site: (one.planes, one.scales, one.global_scale, one.checks) for site, one in record.sites.items()}
    about = (record.plan, record.token_hash, record.numerics_hash, record.weight_version, record.rows)
    values = {s: [None if p is None else p.tolist() for p in t] for s, t in parts.items()}
    return repr((about, record.valid.tolist(), values))  # a changed scale may be a NaN


@pytest.mark.parametrize("plan", ["r1-all+mid/s2", "r4-all/s8", "c1-all/s3"])
def test_what_is_expected_is_read_at_a_glance_and_anything_else_with_care(
    plan: str, make, small_shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick way says of every frame what the careful one says: one byte changed, cut, longer, or another's."""
    tokens = tuple(range(40, 60))
    frame = encode(make(plan, small_shapes, tokens, absent=[3]))
    shapes = tuple(Plan.parse(plan).select(small_shapes, 1000))
    expect = Expectation(
        tokens=tokens, numerics_hash="0123456789abcdef", plan=plan, shapes=shapes, weight_version=3, max_lag=1
    )
    others = [
        replace(expect, tokens=tokens[:-1]), replace(expect, tokens=(*tokens[:-1], 7)),
        replace(expect, plan="r2-all/s8"), replace(expect, plan=f"{plan}+kv"),
        replace(expect, numerics_hash="1" * 16), replace(expect, weight_version=4), replace(expect, weight_version=2),
        replace(expect, shapes=shapes[1:]),
        replace(expect, tokens=(-1, *tokens[1:])),
    ]  # fmt: skip
    frames = [frame, frame[:-1], frame + b"\0", frame[:30]]
    for place in {*range(0, 140, 3), *range(140, len(frame), 97), len(frame) - 1}:
        changed = bytearray(frame)
        changed[place] ^= 1 << place % 8
        frames.append(bytes(changed))
        resealed = bytearray(changed)
        resealed[24:40] = checksum_of(memoryview(bytes(changed)))
        frames.append(bytes(resealed))
    cases = [(one, expect) for one in frames] + [(frame, other) for other in others]
    glances: list[int | None] = []
    own = module.opens_as
    monkeypatch.setattr(module, "opens_as", lambda *args: glances.append(own(*args)) or glances[-1])
    quick = [_outcome(*case) for case in cases]
    assert glances[0] is not None and sum(glance is not None for glance in glances) < len(cases) / 2
    monkeypatch.setattr(module, "opens_as", lambda *_: None)
    for case, found in zip(cases, quick, strict=True):
        assert found == _outcome(*case)
