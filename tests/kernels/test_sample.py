"""The sampling kernel draws the tokens of the plain code, with its log-probabilities up to the order of additions."""

from __future__ import annotations

import pytest
import torch

from tracefp4.rollout.sampler import Draw, sample


def draw(device: torch.device, temperatures: list[float], seed: int = 0) -> Draw:
    rows = len(temperatures)
    g = torch.Generator().manual_seed(seed)
    return Draw(
        torch.randint(-(2**62), 2**62, (rows,), generator=g).to(device),
        torch.randint(0, 2**20, (rows,), generator=g).to(device),
        torch.tensor(temperatures, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.ones(rows, device=device),
    )


def both(logits: torch.Tensor, how: Draw, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple, tuple]:
    found = sample(logits, how)
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = sample(logits, how)
    monkeypatch.delenv("TRACEFP4_KERNELS")
    return found, expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (3, 1024), (5, 3001), (2, 5000)])
def test_tokens_and_logprobs(device, monkeypatch, dtype, rows, vocabulary):
    g = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(rows, vocabulary, generator=g)).to(dtype).to(device)
    how = draw(device, [(0.0, 1.0, 0.7, 1.3)[(i + 1) % 4] for i in range(rows)], vocabulary)
    (tokens, logprobs), (same, close) = both(logits, how, monkeypatch)
    assert torch.equal(tokens, same)
    torch.testing.assert_close(logprobs, close, rtol=1e-5, atol=1e-5)


def test_parts_of_the_vocabulary_are_put_together(device, monkeypatch):
    """As many rows as make a part longer than one block; the last part is shorter."""
    from tracefp4.kernels import sample as kernel

    monkeypatch.setattr(kernel, "_PROGRAMS", 4)
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).to(device)
    (tokens, logprobs), (same, close) = both(logits, draw(device, [1.0, 0.0, 1.0]), monkeypatch)
    assert torch.equal(tokens, same)
    torch.testing.assert_close(logprobs, close, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["random", "rising", "falling", "level"])
def test_no_token_is_passed_over_that_would_win(device, monkeypatch, order):
    """Long parts, in which most blocks draw no noise: the plain code, which draws all of it, finds no better token."""
    from tracefp4.kernels import sample as kernel

    monkeypatch.setattr(kernel, "_PROGRAMS", 1)
    drawn, rows = 12_000, 6
    logits = torch.randn(rows, drawn, generator=torch.Generator().manual_seed(3))
    if order in ("rising", "falling"):
        logits = logits.sort(dim=-1, descending=order == "falling")[0]
    if order == "level":
        logits = torch.zeros_like(logits)
    how = draw(device, [1.0, 0.5, 2.0, 0.0, 1.0, 1.0], len(order))
    (tokens, logprobs), (same, close) = both(logits.to(device), how, monkeypatch)
    assert torch.equal(tokens, same)
    torch.testing.assert_close(logprobs, close, rtol=1e-5, atol=1e-5)


def test_of_equal_logits_the_first_wins_greedily(device):
    logits = torch.zeros(1, 4000, device=device)
    logits[0, [1500, 17, 3900]] = 2.0
    assert sample(logits, draw(device, [0.0]))[0].tolist() == [17]


def test_masked_tokens_are_never_drawn_and_nan_shows(device):
    logits = torch.full((3, 3000), float("-inf"), device=device)
    logits[0, 2990] = 1.0
    logits[1, :] = 0.0
    logits[1, 5] = float("nan")
    logits[2, [3, 2000]] = torch.tensor([0.0, 0.0], device=device)
    tokens, logprobs = sample(logits, draw(device, [1.0, 1.0, 1.0]))
    assert tokens[0] == 2990 and logprobs[0] == 0.0
    assert logprobs[1].isnan() and 0 <= int(tokens[1]) < 3000
    assert int(tokens[2]) in (3, 2000) and logprobs[2].item() == pytest.approx(-0.6931472, abs=1e-6)


def test_the_noise_is_spread_as_it_should_be(device):
    """Frequencies of 2,048 draws of four tokens against their probabilities, within four standard errors."""
    rows = 2048
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probabilities.log().expand(rows, 4).contiguous().to(device)
    tokens, _ = sample(logits, draw(device, [1.0] * rows, 5))
    found = torch.bincount(tokens.cpu(), minlength=4) / rows
    assert ((found - probabilities).abs() < 4 * (probabilities * (1 - probabilities) / rows).sqrt()).all()
