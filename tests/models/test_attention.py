"""The shared attention core against a written-out softmax."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import ModelError
from tracefp4.models.attention import attention_forward, causal_mask, dense_attention, no_mask
from tracefp4.models.latent import expand_latent, join_rope, rope_part
from tracefp4.models.tiny import tiny_model


def tensors(device, dtype, queries=7, keys=7, heads=4, kv_heads=2, width=32, v_width=32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, width), (2, kv_heads, keys, width), (2, kv_heads, keys, v_width))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def plain(q, k, v, scaling, sinks, mask):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(groups, 1) for t in (k, v))
    logits = (q.double() @ k.transpose(2, 3) * scaling).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 9), (3, 9), (1, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_causal(device, queries, keys, kv_heads, window, with_sinks):
    q, k, v = tensors(device, torch.float32, queries, keys, kv_heads=kv_heads)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device) if with_sinks else None
    out = dense_attention(q, k, v, scaling=0.2, window=window, sinks=sinks)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if window is not None:
        mask &= ~torch.ones_like(mask).tril(keys - queries - window)
    torch.testing.assert_close(out.double(), plain(q, k, v, 0.2, sinks, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 4])
def test_explicit_mask_is_taken_as_it_is(device, with_sinks, queries):
    q, k, v = tensors(device, torch.float32, queries, 9)
    lengths = torch.tensor([5, 9], device=device)
    mask = (torch.arange(9, device=device) < lengths[:, None])[:, None, None, :]
    sinks = torch.randn(4, device=device) if with_sinks else None
    window = 4 if with_sinks else None
    out = dense_attention(q, k, v, scaling=0.3, window=window, sinks=sinks, mask=mask)
    torch.testing.assert_close(out.double(), plain(q, k, v, 0.3, sinks, mask), atol=1e-5, rtol=1e-5)


def test_mask_of_each_query(device):
    q, k, v = tensors(device, torch.float32, 4, 6)
    mask = causal_mask(4, 6, None, torch.device(device))
    out = dense_attention(q, k, v, scaling=0.3, mask=mask)
    torch.testing.assert_close(out, dense_attention(q, k, v, scaling=0.3), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_bfloat16_and_different_value_width(device, with_sinks):
    q, k, v = tensors(device, torch.bfloat16, kv_heads=4, width=64, v_width=32)
    sinks = torch.randn(4, device=device).bfloat16() if with_sinks else None
    out = dense_attention(q, k, v, scaling=0.2, sinks=sinks)
    mask = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
    assert out.dtype is torch.bfloat16
    assert out.shape == (2, 7, 4, 32)
    torch.testing.assert_close(out.double(), plain(q, k, v, 0.2, sinks, mask), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (17, 30)])
@pytest.mark.parametrize("window", [None, 3, 9])
def test_blocks_of_queries(device, monkeypatch, queries, keys, window):
    q, k, v = tensors(device, torch.float32, queries, keys)
    sinks = torch.randn(4, device=device)
    whole = dense_attention(q, k, v, scaling=0.2, window=window, sinks=sinks)
    monkeypatch.setattr("tracefp4.models.attention.QUERY_BLOCK", 8)
    blocks = dense_attention(q, k, v, scaling=0.2, window=window, sinks=sinks)
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-6)


def test_window_wider_than_the_sequence_is_no_window(device):
    q, k, v = tensors(device, torch.float32)
    wide = dense_attention(q, k, v, scaling=0.2, window=100)
    torch.testing.assert_close(wide, dense_attention(q, k, v, scaling=0.2), atol=1e-6, rtol=1e-6)


def test_gradients_reach_sinks_and_values():
    q, k, v = (t.requires_grad_() for t in tensors("cpu", torch.float64))
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(
        lambda *t: dense_attention(*t[:3], scaling=0.2, window=3, sinks=t[3]), (q, k, v, sinks), fast_mode=True
    )


def test_latent_expansion_is_that_of_transformers():
    model = tiny_model("deepseek_v3", dtype=torch.float32)
    module = model.model.layers[0].self_attn
    latent, k_rope = torch.randn(2, 5, 64), torch.randn(2, 1, 5, 32)
    k_nope, v = expand_latent(module, latent)
    keys, values = module.expand_kv(latent.unsqueeze(1), k_rope)
    assert torch.equal(join_rope(k_nope, k_rope), keys)
    assert torch.equal(v, values)
    assert torch.equal(rope_part(module, keys), k_rope)


def test_unsupported_requests_are_refused():
    model = tiny_model("mixtral")
    module = model.model.layers[0].self_attn
    object.__setattr__(module, "tracefp4", object())
    q, k, v = tensors("cpu", torch.float32)
    with pytest.raises(ModelError, match="dropout"):
        attention_forward(module, q, k, v, None, dropout=0.1)
    with pytest.raises(ModelError, match="softcap"):
        attention_forward(module, q, k, v, None, softcap=30.0)


def test_mask_function():
    ones = torch.ones(2, 4, dtype=torch.bool)
    assert no_mask(attention_mask=ones, q_length=4) is None
    assert no_mask(q_length=4) is None
    with pytest.raises(ModelError, match="pad on the right"):
        no_mask(attention_mask=torch.tensor([[False, True], [True, True]]))
