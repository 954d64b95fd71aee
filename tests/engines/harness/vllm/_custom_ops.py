"""Rotary position embedding in place, in plain PyTorch.

SGLang takes this function from vLLM on devices for which it has no kernel of its own. It rotates pairs of channels of
queries and keys by an angle that grows with the position (Su et al., RoFormer, 2021): ``(a, b) -> (a cos - b sin,
b cos + a sin)``, the pairs being ``(i, i + d/2)`` in the NeoX layout and ``(2i, 2i + 1)`` otherwise.
"""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate ``query`` and ``key`` ``(T, heads * head_size)`` in place; the cache holds cosines, then sines."""
    angles = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = angles.chunk(2, dim=-1)
    width = 2 * cos.shape[-1]
    for tensor in (query, key):
        heads = tensor.view(angles.shape[0], -1, head_size)[..., :width]
        left, right = heads.float().chunk(2, -1) if is_neox else (heads[..., ::2].float(), heads[..., 1::2].float())
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        a, b = left * c - right * s, right * c + left * s
        rotated = torch.cat([a, b], -1) if is_neox else torch.stack([a, b], -1).flatten(-2)
        heads.copy_(rotated.to(tensor.dtype))
