"""A second, slow implementation of every preset, written value by value in numpy fp32 from the published formulas.

It shares no code with the package: block scales are found by searching all bytes, codes by searching all magnitudes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracefp4.formats.blocks import quantize
from tracefp4.formats.numerics import get_numerics

F = np.float32
FLT_MAX = np.finfo(F).max
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])


def nearest(grid: np.ndarray, value: float, ties: str = "even") -> int:
    distance = np.abs(grid - min(float(value), grid[-1]))
    best = np.flatnonzero(distance == distance.min())
    if len(best) == 1:
        return int(best[0])
    return int({"even": best[best % 2 == 0][0], "up": best[-1], "down": best[0]}[ties])


def e4m3_byte(value: F) -> int:
    return nearest(E4M3, value)


def nvfp4_te(x: np.ndarray) -> tuple[F, list[int], list[F]]:
    a = np.abs(x).max()
    g = min(F(2688) / a, FLT_MAX) if a else F(1)
    factor = g * (F(1) / F(6))
    scales = [e4m3_byte(min(np.abs(b).max() * factor, F(448))) for b in x.reshape(-1, 16)]
    return g, scales, [min(F(1) / (F(E4M3[s]) * (F(1) / g)), FLT_MAX) if s else F(0) for s in scales]


def nvfp4_flashinfer_fast(x: np.ndarray) -> tuple[F, list[int], list[F]]:
    a = np.abs(x).max()
    g = min(F(2688) / a, FLT_MAX) if a else F(1)
    scales = [e4m3_byte(g * (np.abs(b).max() * (F(1) / F(6)))) for b in x.reshape(-1, 16)]
    return g, scales, [min(F(1) / (F(E4M3[s]) * (F(1) / g)), FLT_MAX) if s else F(0) for s in scales]


def nvfp4_pow2(x: np.ndarray) -> tuple[F, list[int], list[F]]:
    a = float(np.abs(x).max())
    power = 0
    if a:
        power = 126
        while 2.0**power * a > 2688 and power > -126:
            power -= 1
    d = F(2.0**-power)
    scales = [e4m3_byte(np.abs(b).max() / (F(6) * d)) for b in x.reshape(-1, 16)]
    return d, scales, [F(E4M3[s]) * d for s in scales]


def nvfp4_modelopt(x: np.ndarray) -> tuple[F, list[int], list[F]]:
    a = np.abs(x).max()
    d = a / F(2688)
    d = d if d else F(1)
    scales = []
    for b in x.reshape(-1, 16):
        m = np.abs(b).max()
        scales.append(e4m3_byte(min(max(m / (F(6) * d), F(2.0**-9)), F(448))) if m else e4m3_byte(F(1)))
    return d, scales, [F(E4M3[s]) * d for s in scales]


def nvfp4_ct(x: np.ndarray) -> tuple[F, list[int], list[F]]:
    a = np.abs(x).max()
    g = (F(1) / a) * F(2688) if a else F(1)
    scales = [e4m3_byte(g * (np.abs(b).max() / F(6))) or e4m3_byte(F(0.125)) for b in x.reshape(-1, 16)]
    return g, scales, [F(E4M3[s]) / g for s in scales]


def mx(x: np.ndarray, block: int, rule: str, floor: int = 0) -> list[int]:
    """E8M0 bytes for E2M1 elements by float64 logarithms, safe away from the last place."""
    out = []
    for b in x.reshape(-1, block):
        m = float(np.abs(b).max())
        if m == 0:
            out.append(floor)
            continue
        exponent = math.frexp(m)[1] - 1
        if rule == "ceil":
            exponent += m > 1.5 * 2.0**exponent
        elif rule == "half":
            exponent += m >= 1.75 * 2.0**exponent
        out.append(min(max(exponent - 2 + 127, floor), 254))
    return out


NVFP4 = {
    "nvfp4-te": (nvfp4_te, "multiply"),
    "nvfp4-flashinfer-exact": (nvfp4_te, "multiply"),
    "nvfp4-flashinfer-fast": (nvfp4_flashinfer_fast, "multiply"),
    "nvfp4-pow2": (nvfp4_pow2, "divide"),
    "nvfp4-modelopt": (nvfp4_modelopt, "divide"),
    "nvfp4-ct": (nvfp4_ct, "divide"),
}
MX = {
    "mxfp4-ocp": (32, "floor", 0, "even"),
    "mxfp4-ceil": (32, "ceil", 0, "even"),
    "mxfp4-ct": (32, "half", 0, "even"),
    "sglang-kv-mx": (16, "ceil", 94, "up"),
}


def codes(x: np.ndarray, unit: list[F], how: str, ties: str = "even") -> list[int]:
    out = []
    for b, u in zip(x.reshape(len(unit), -1), unit, strict=True):
        for v in b:
            z = (v * u if how == "multiply" else v / u) if u else F(0)
            out.append(nearest(E2M1, abs(z), ties) + 8 * bool(np.signbit(z)))
    return out


@pytest.mark.parametrize("kind", ["normal", "wide", "outlier", "float32"])
@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_equals_a_value_by_value_reference(name, kind, device, samples, row_scope):
    x = samples(kind)
    q = quantize(x.to(device), row_scope(name))
    compute, how = NVFP4[name]
    with np.errstate(divide="ignore"):
        for row in range(len(x)):
            values = x[row].float().numpy()
            scale, scales, unit = compute(values)
            assert q.global_scale[row].item() == scale
            assert q.scales[row].tolist() == scales
            assert q.codes[row].tolist() == codes(values, unit, how)


@pytest.mark.parametrize("kind", ["normal", "wide", "outlier", "float32"])
@pytest.mark.parametrize("name", MX)
def test_mx_equals_a_value_by_value_reference(name, kind, device, samples):
    x = samples(kind)
    block, rule, floor, ties = MX[name]
    q = quantize(x.to(device), get_numerics(name))
    for row in range(len(x)):
        values = x[row].float().numpy()
        scales = mx(values, block, rule, floor)
        assert q.scales[row].tolist() == scales
        unit = [np.float32(2.0 ** (s - 127)) for s in scales]
        assert q.codes[row].tolist() == codes(values, unit, "divide", ties)
