"""Keys in another basis: attention stays what it is, and FP4 loses less where channels stick out."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import ConfigError
from tracefp4.formats.blocks import quantize
from tracefp4.formats.spec import get_spec
from tracefp4.models.attention import dense_attention
from tracefp4.models.key_basis import KeyBasis, random_signs, turned


def tensors(width: int = 32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 24, width, generator=generator) for heads in (4, 2, 2))
    k[..., 3] += 40.0  # a channel that is large for all tokens
    return q, k, v


@pytest.mark.parametrize("width", [1, 2, 64, 128])
def test_a_turn_is_orthonormal_and_spreads_one_channel_over_all(width: int) -> None:
    turn = turned(torch.eye(width), random_signs(width, seed=3))
    assert torch.allclose(turn @ turn.T, torch.eye(width), atol=1e-6)
    assert torch.allclose(turn.abs(), torch.full((width, width), width**-0.5))


def test_a_width_that_no_such_matrix_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="keys of 96 channels cannot be rotated"):
        random_signs(96)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_attention_does_not_notice(centred: bool, rotated: bool) -> None:
    q, k, v = tensors()
    centre = k.mean((0, 2)).unsqueeze(1) if centred else None
    basis = KeyBasis(centre, random_signs(32) if rotated else None)
    expected = dense_attention(q, k, v, scaling=0.2)
    assert torch.allclose(dense_attention(basis.queries(q), basis.keys(k), v, scaling=0.2), expected, atol=2e-5)


def test_rounded_keys_give_attention_that_is_nearer_to_the_truth() -> None:
    q, k, v = tensors()
    numerics = get_spec("nvfp4-kv4").kv
    assert numerics is not None

    def error(basis: KeyBasis) -> float:
        stored = quantize(basis.keys(k), numerics).dequantize(torch.float32)
        found = dense_attention(basis.queries(q), stored, v, scaling=0.2)
        return float((found - dense_attention(q, k, v, scaling=0.2)).square().mean())

    centre = k.mean((0, 2)).unsqueeze(1)
    plain, both = error(KeyBasis(None, None)), error(KeyBasis(centre, random_signs(32)))
    assert both < 0.5 * plain
    assert error(KeyBasis(centre, None)) < 0.5 * plain
