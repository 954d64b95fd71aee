"""Residual compensation against a channel-by-channel reference."""

import pytest
import torch

from tracefp4.errors import FormatError
from tracefp4.formats.blocks import quantize
from tracefp4.formats.spec import get_spec
from tracefp4.quantizers.residual import compensated

NUMERICS = {name: get_spec(name).activations for name in ("nvfp4-w4a4", "mxfp4-w4a4-kv4", "mxfp4-w4a8-kv4")}


def values(rows=5, width=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=g) * 3).bfloat16()


def decoded(operand, q):
    scale = q.decode_scale()
    return operand if scale is None else operand * scale


def error(x, found):
    return float((x.float() - found).norm() / x.float().norm())


@pytest.mark.parametrize("spec", NUMERICS)
def test_reference_by_row(spec):
    x = values()
    q = quantize(x, NUMERICS[spec])
    found = compensated(x, q, 0.5)
    for i in range(len(x)):
        row = x[i].float()
        first = q.dequantize()[i]
        residual = row - first
        chosen = set(sorted(range(64), key=lambda c: (-abs(float(residual[c])), c))[:32])
        kept = torch.tensor([float(r) if c in chosen else 0.0 for c, r in enumerate(residual)])
        scale = None if q.global_scale is None else q.global_scale[i : i + 1]
        second = quantize(kept[None], NUMERICS[spec], scale).dequantize()[0]
        torch.testing.assert_close(decoded(found, q)[i], first + second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", NUMERICS)
def test_more_channels_leave_less_error(spec):
    x = values(seed=1)
    q = quantize(x, NUMERICS[spec])
    errors = [error(x, decoded(compensated(x, q, share), q)) for share in (0.125, 0.25, 0.5, 0.75, 1.0)]
    assert error(x, q.dequantize()) > errors[0]
    assert errors == sorted(errors, reverse=True)
    # All channels: two codes for a value, each of relative error about a tenth.
    assert errors[-1] < 0.2 * error(x, q.dequantize())


@pytest.mark.parametrize("spec", NUMERICS)
def test_devices_agree(spec, device):
    x = values(rows=64, width=128, seed=3)
    expected = compensated(x, quantize(x, NUMERICS[spec]), 0.5)
    there = x.to(device)
    assert torch.equal(compensated(there, quantize(there, NUMERICS[spec]), 0.5).cpu(), expected)


def test_a_row_does_not_depend_on_its_batch():
    x = values(seed=2)
    q = quantize(x, NUMERICS["nvfp4-w4a4"])
    alone = quantize(x[2:3], NUMERICS["nvfp4-w4a4"])
    assert torch.equal(compensated(x, q, 0.5)[2:3], compensated(x[2:3], alone, 0.5))


def test_zero_rows_and_wrong_shares():
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    q = quantize(x, NUMERICS["nvfp4-w4a4"])
    assert not compensated(x, q, 0.5).any()
    for share in (0.0, 1.5):
        with pytest.raises(FormatError, match="share of the channels"):
            compensated(x, q, share)
