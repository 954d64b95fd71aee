"""Other people's quantizers as oracles, on the CPU, and each way in which they differ from the formats' definitions.

Where a preset of ours or a variant of one describes a library's arithmetic, the comparison is bit for bit. Importing
the libraries takes some seconds, once for the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tracefp4.formats import blocks, e2m1
from tracefp4.formats.blocks import Quantized, quantize
from tracefp4.formats.numerics import Numerics, get_numerics

pytestmark = pytest.mark.filterwarnings("ignore")

TE = get_numerics("nvfp4-te")
TENSOR = replace(TE, scope="tensor")
EPS = 2.0**-6
"""torchao's smallest block scale, the smallest normal E4M3."""


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    reason = "torchao is not installed (a development extra)"
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=reason)
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=reason)
    config = pytest.importorskip("torchao.prototype.mx_formats.config", reason=reason)
    return SimpleNamespace(
        nvfp4=nv.nvfp4_quantize, scale=nv.per_tensor_amax_to_scale, mx=mx.to_mx, mode=config.ScaleCalculationMode
    )


@pytest.fixture(scope="module")
def compressed() -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """NVFP4 of compressed-tensors: ``x -> (global scale, block scales, values in [-6, 6])``."""
    reason = "compressed-tensors is not installed (extra 'export')"
    ct = pytest.importorskip("compressed_tensors.quantization", reason=reason)
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers", reason=reason)
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward", reason=reason)
    e4m3 = torch.float8_e4m3fn
    args = ct.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=e4m3,
        zp_dtype=e4m3,
    )

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g = helpers.generate_gparam(x.min(), x.max())
        grouped = x.unflatten(-1, (-1, 16))
        scales, zero = helpers.calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=g)
        return g, scales, forward.quantize(x, scales, zero, args, global_scale=g)

    return run


@pytest.fixture(scope="module")
def compressed_mx() -> Callable[[Tensor], Tensor]:
    """MXFP4 block scales of compressed-tensors."""
    ct = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    args = ct.QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )

    def run(x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (-1, 32))
        return helpers.calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)[0]

    return run


@pytest.fixture(scope="module")
def fouroversix() -> SimpleNamespace:
    reason = "fouroversix is not installed (its source distribution is built by hand)"
    reference = pytest.importorskip("fouroversix.quantize.pytorch.reference", reason=reason)
    utils = pytest.importorskip("fouroversix.utils", reason=reason)

    def run(x: Tensor, kind: str = "nvfp4") -> tuple[Tensor, Tensor]:
        packed, scales, _ = reference.quantize_to_fp4(
            x,
            fp4_format=utils.DataType(kind),
            scale_rule=utils.ScaleRule.static_6,
            pack_values=True,
            use_blackwell_scale_layout=False,
        )
        return scales.view(torch.uint8).view(len(x), -1), packed.view(torch.uint8).view(len(x), -1)

    return SimpleNamespace(run=run, reference=reference)


def normal(rows: int = 128, width: int = 256, seed: int = 0) -> Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


def wide(rows: int = 128, width: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    row = torch.exp(4 * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, width, generator=generator) * row).bfloat16()


INPUTS = [normal, wide, lambda: normal().float() * 1.37, lambda: wide().float() * 0.7]


def packed(q: Quantized) -> Tensor:
    return e2m1.pack(q.codes)


def share(different: Tensor) -> float:
    return different.float().mean().item()


# torchao 0.18


@pytest.mark.parametrize("make", INPUTS)
def test_torchao_without_a_global_scale(torchao, make):
    """Deviation: its block scales never fall below 2^-6, not even for zeros; E4M3 reaches 2^-9."""
    x = make()
    x[3] = 0
    n = replace(TE, scale_rule="block-first", scope="constant", scale_floor=EPS, zero_scale=EPS)
    scales, data = torchao.nvfp4(x)
    q = quantize(x, n)
    assert torch.equal(scales.view(torch.uint8), q.scales)
    assert torch.equal(data, packed(q))
    assert (scales[3].float() == 0.015625).all()


@pytest.mark.parametrize("make", INPUTS)
def test_torchao_with_a_power_of_two_global_scale(torchao, make):
    """With every step exact, only the floor of 2^-6 remains of its differences from our arithmetic."""
    x = make()
    n = replace(
        get_numerics("nvfp4-pow2"),
        scope="tensor",
        scale_rule="block-first",
        quotient="reciprocal",
        scale_floor=EPS,
        zero_scale=EPS,
    )
    q = quantize(x, n)
    scales, data = torchao.nvfp4(x, per_tensor_scale=q.global_scale)
    assert torch.equal(scales.view(torch.uint8), q.scales)
    assert torch.equal(data, packed(q))


def test_torchao_order_of_operations(torchao):
    """Deviation: ``(m / 6) / d`` and ``x * ((1 / d) / s)``; each differs from TransformerEngine's in few blocks."""
    scales, codes = [], []
    for seed in range(24):  # how often depends on the largest value: whether block scales fall on E4M3's midpoints
        x = normal(32, seed=seed)
        s, data = torchao.nvfp4(x, per_tensor_scale=torchao.scale(x.abs().max()))
        q = quantize(x, TENSOR)
        scales.append(s.view(torch.uint8).int() - q.scales.int())
        codes.append(e2m1.unpack(data) != q.codes)
    assert 0.0005 < share(torch.cat(scales) != 0) < 0.03
    assert 0.0002 < share(torch.cat(codes)) < 0.01
    assert torch.cat(scales).abs().max() == 1


def test_torchao_floor_on_wide_data(torchao):
    """On rows of very different size the floor changes half of all blocks."""
    x = wide(512)
    scales, data = torchao.nvfp4(x, per_tensor_scale=torchao.scale(x.abs().max()))
    q = quantize(x, TENSOR)
    raised = blocks.decode_scales(q.scales, TENSOR) < EPS
    different = scales.view(torch.uint8) != q.scales
    assert share(different) > 0.4
    assert share(different & ~raised) < 0.02
    assert share(e2m1.unpack(data) != q.codes) > 0.2


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize(("mode", "rule"), [("FLOOR", "floor"), ("RCEIL", "ceil"), ("EVEN", "half")])
def test_torchao_mx(torchao, make, mode, rule):
    x = make()
    x[3] = 0
    x[4, :32] = 1e-38
    elements = {"mxfp4-ocp": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}
    for name, dtype in elements.items():
        q = quantize(x, replace(get_numerics(name), scale_rule=rule))
        scales, data = torchao.mx(x, dtype, 32, torchao.mode[mode])
        assert torch.equal(scales.view(torch.uint8), q.scales)
        want = q.codes if name == "mxfp8" else packed(q)
        # Deviation: a scale of 2^-127 (byte 0) is used as 2^-126 (FLOOR, EVEN), so codes of such blocks differ.
        keep = (q.scales != 0).repeat_interleave(want.shape[1] // q.scales.shape[1], -1)
        assert torch.equal(data.view(torch.uint8).view(want.shape)[keep], want[keep])


def test_torchao_mx_of_nan_and_infinity(torchao):
    x = normal(2, 64)
    x[0, 5], x[1, 40] = float("nan"), float("inf")
    ours = quantize(x, get_numerics("mxfp4-ocp")).scales
    theirs = torchao.mx(x, torch.float4_e2m1fn_x2, 32, torchao.mode.FLOOR)[0].view(torch.uint8)
    assert ours[0, 0] == theirs[0, 0] == 255
    # Deviation: an infinity takes the exponent one above the largest finite float; ours saturates at that float.
    assert (ours[1, 1], theirs[1, 1]) == (252, 253)


# compressed-tensors 0.20.1


@pytest.mark.parametrize("make", INPUTS)
def test_compressed_tensors_in_float32(compressed, make):
    x = make().float()
    x[3, :16] = 0
    g, scales, values = compressed(x)
    q = quantize(x, get_numerics("nvfp4-ct"))
    assert g.item() == q.global_scale.item()
    assert torch.equal(scales.float(), blocks.decode_scales(q.scales, q.numerics))
    assert torch.equal(values, e2m1.decode(q.codes))
    assert torch.equal(torch.signbit(values), q.codes >= 8)
    assert scales[3, 0] == 0.125


def test_compressed_tensors_global_scale_is_a_reciprocal(compressed):
    """Deviation: ``2688 / a`` of a Python number and a tensor is ``(1 / a) * 2688``, off by one unit now and then."""
    amax = torch.linspace(1, 2, 2001)
    theirs = torch.stack([compressed(torch.full((1, 16), a))[0] for a in amax[:200]]).view(-1)
    exact = torch.div(torch.full_like(amax, 2688.0), amax)[:200]
    assert 0.05 < share(theirs != exact) < 0.6
    assert ((theirs - exact).abs() <= exact * 2**-23).all()


def test_compressed_tensors_drops_the_sign_of_minus_zero(compressed):
    """Deviation: -0.0 becomes +0.0, while a negative value that rounds to zero keeps its sign."""
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6.0, -0.0, -0.01])
    values = compressed(x)[2]
    assert torch.signbit(values[0, :3]).tolist() == [False, False, True]
    assert quantize(x, get_numerics("nvfp4-ct")).codes[0, :3].tolist() == [7, 0, 8]
    assert quantize(x, TE).codes[0, :3].tolist() == [7, 8, 8]


def test_compressed_tensors_in_bfloat16(compressed):
    """Deviation: bfloat16 extremes give a global scale and block scales of eight significant bits."""
    different = []
    for seed in range(8):
        x = normal(32, seed=seed)
        g, scales, values = compressed(x)
        q = quantize(x, get_numerics("nvfp4-ct"))
        assert g.item() == g.bfloat16().item() != q.global_scale.item()
        different.append(
            (
                share(scales.float() != blocks.decode_scales(q.scales, q.numerics)),
                share(values.float() != e2m1.decode(q.codes)),
            )
        )
    for column in zip(*different, strict=True):
        assert 0.002 < sum(column) / 8 < 0.1


@pytest.mark.parametrize("make", INPUTS)
def test_compressed_tensors_mx_scales(compressed_mx, make):
    x = make().float()
    q = quantize(x, get_numerics("mxfp4-ct"))
    assert torch.equal(compressed_mx(x), blocks.decode_scales(q.scales, q.numerics))


# fouroversix 1.0.5


def order_of_fouroversix() -> Numerics:
    """Its arithmetic: ``g * (m / 6)``, then TransformerEngine's reciprocal."""
    return replace(TENSOR, scale_rule="block-first")


@pytest.mark.parametrize("make", [normal, lambda: normal().float() * 1.37])
def test_fouroversix_static_6(fouroversix, make):
    x = make()
    x[3, :16] = 0
    q = quantize(x, order_of_fouroversix())
    scales, data = fouroversix.run(x)
    assert torch.equal(scales, q.scales)
    assert torch.equal(data, packed(q))


def test_fouroversix_order_of_operations():
    """Deviation from TransformerEngine: ``g * (m / 6)`` instead of ``m * (g / 6)``, in few blocks."""
    pairs = [
        (quantize(normal(32, seed=s), TENSOR), quantize(normal(32, seed=s), order_of_fouroversix())) for s in range(24)
    ]
    scales = share(torch.cat([a.scales != b.scales for a, b in pairs]))
    codes = share(torch.cat([a.codes != b.codes for a, b in pairs]))
    assert 0.0005 < scales < 0.03
    assert 0.00005 < codes < 0.005


def test_fouroversix_writes_minus_zero_for_values_beyond_seven(fouroversix):
    """Deviation: nothing clips before rounding to even twos, so 7 and more become 8, whose bits pack as code 8."""
    values = torch.tensor([6.9, 7.0, 7.5, -7.5])
    rounded = fouroversix.reference.fake_quantize_to_e2m1(values)
    assert rounded.tolist() == [6, 8, 8, -8]
    assert fouroversix.reference.quantize_bf16_to_unpacked_fp4(rounded.bfloat16()).tolist() == [7, 8, 8, 8]
    # It happens where a block scale is rounded down among the coarse subnormals.
    x = wide()
    q = quantize(x, order_of_fouroversix())
    scales, data = fouroversix.run(x)
    different = e2m1.unpack(data) != q.codes
    assert torch.equal(scales, q.scales)
    assert 0 < share(different) < 0.05
    assert set((q.codes[different] & 7).tolist()) == {7}
    assert set(e2m1.unpack(data)[different].tolist()) == {8}


@pytest.mark.parametrize("make", INPUTS)
def test_fouroversix_mxfp4(fouroversix, make):
    x = make()
    q = quantize(x, get_numerics("mxfp4-ceil"))
    scales, data = fouroversix.run(x, "mxfp4")
    assert torch.equal(scales, q.scales)
    # Deviation: the sign of zero.
    assert torch.equal(e2m1.decode(e2m1.unpack(data)), e2m1.decode(q.codes))


def test_fouroversix_error_on_gaussian_data(fouroversix):
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * 3
    scales, data = fouroversix.run(x)
    theirs = Quantized(e2m1.unpack(data), scales, blocks.global_scale(x, TENSOR), TENSOR).dequantize()
    ours = quantize(x, TENSOR).dequantize()
    for value in (theirs, ours):
        assert ((value - x).norm() / x.norm()).item() == pytest.approx(0.0951, abs=4e-4)
