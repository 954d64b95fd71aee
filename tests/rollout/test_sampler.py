"""Distributions, log-probabilities, and random numbers that depend on nothing but their keys."""

from __future__ import annotations

import math

import pytest
import torch

from tracefp4.rollout import sampler
from tracefp4.rollout.sampler import Draw, gumbel, random_bits, sample, stream_key, truncated

VOCABULARY = 12


def draw(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, device: str | torch.device = "cpu"
) -> Draw:
    return Draw(
        stream=torch.full((rows,), stream_key(1, 2), device=device),
        position=torch.arange(rows, device=device),
        temperature=torch.full((rows,), temperature, device=device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, device=device),
    )


def logits() -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 1.5


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Statistic divided by its expectation plus four standard deviations: above 1 is a p-value below about 1e-4."""
    kept = probabilities > 0
    counts = torch.bincount(tokens.cpu(), minlength=VOCABULARY)
    assert not counts[~kept].any()
    expected = probabilities[kept] * len(tokens)
    freedom = int(kept.sum()) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    return statistic / (freedom + 4 * math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 4, 1.0), (1.0, 0, 0.8), (1.0, 5, 0.7)]
)
def test_tokens_follow_the_distribution(device, temperature, top_k, top_p):
    rows, row = 40000, logits()
    tokens, logprobs = sample(
        row.expand(rows, -1).to(device),
        draw(rows, temperature=temperature, top_k=top_k, top_p=top_p, device=device),
        True,
    )
    whole = torch.softmax(row / temperature, -1)
    expected = whole.clone()
    order = torch.argsort(whole, descending=True)
    if top_k:
        expected[order[top_k:]] = 0
    expected /= expected.sum()
    kept = order[: int((expected[order].cumsum(0) < top_p).sum()) + 1]
    expected = torch.zeros_like(expected).index_copy_(0, kept, expected[kept])
    assert chi_square(tokens, expected / expected.sum()) < 1
    # Log-probabilities are those of the whole distribution, whatever was cut off.
    torch.testing.assert_close(logprobs.cpu(), whole.log()[tokens.cpu()], atol=1e-5, rtol=0)


def test_greedy_takes_the_largest_at_temperature_one():
    row = logits()
    tokens, logprobs = sample(row.expand(3, -1), draw(3, temperature=0.0))
    assert tokens.tolist() == [int(row.argmax())] * 3
    torch.testing.assert_close(logprobs, torch.log_softmax(row, -1)[tokens])


def test_truncation_keeps_ties_in_order_and_never_everything_away():
    level = torch.zeros(2, 4)
    kept = truncated(level, torch.tensor([2, 0]), torch.tensor([1.0, 1e-9]))
    assert kept.isfinite().tolist() == [[True, True, False, False], [True, False, False, False]]


def test_rows_do_not_see_each_other():
    row = torch.randn(6, 50)
    all_rows = draw(6, top_k=3)
    together = sample(row, all_rows, True)
    for i in range(6):
        one = Draw(
            *(getattr(all_rows, name)[i : i + 1] for name in ("stream", "position", "temperature", "top_k", "top_p"))
        )
        alone = sample(row[i : i + 1], one, True)
        assert together[0][i] == alone[0][0] and together[1][i] == alone[1][0]


def test_noise_is_stable_under_small_changes():
    row = torch.randn(1, 1000).expand(4000, -1)
    moved = row + 1e-3 * torch.randn(4000, 1000, generator=torch.Generator().manual_seed(0))
    same = sample(row, draw(4000))[0] == sample(moved, draw(4000))[0]
    assert same.float().mean() > 0.99


def test_nan_logits_are_seen():
    row = logits()
    row[3] = float("nan")
    assert sample(row[None], draw(1))[1].isnan().all()


def test_splitmix_matches_its_published_constants():
    # First outputs of SplitMix64 seeded with 0, as in the reference implementation by S. Vigna.
    state = torch.arange(1, 4) * sampler._GOLDEN
    found = [value % 2**64 for value in sampler._mix(state).tolist()]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_gumbel_moments_and_independence():
    noise = gumbel(torch.tensor([stream_key(0, 0), stream_key(0, 1)]), torch.tensor([5, 5]), 200000)
    assert noise.mean(-1).tolist() == pytest.approx([0.5772] * 2, abs=0.02)
    assert noise.var(-1).tolist() == pytest.approx([math.pi**2 / 6] * 2, abs=0.04)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.01
    assert stream_key(0, 1) != stream_key(1, 0) and stream_key("0", 1) != stream_key(0, 1)


def test_a_compiler_sees_no_64_bit_product_of_an_index():
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(sample, dynamic=True, backend=backend, fullgraph=True)
    rows = logits().expand(3, -1)
    for one, other in zip(compiled(rows, draw(3)), sample(rows, draw(3)), strict=True):
        assert torch.equal(one, other)
    assert any("counters" in target for target in seen) and not any("arange" in target for target in seen)


@pytest.mark.slow
def test_compiled_random_bits_are_the_same(device):
    torch._dynamo.reset()
    stream, position = torch.tensor([stream_key(3, 1), -1, 2**62], device=device), torch.arange(3, device=device)
    compiled = torch.compile(random_bits, dynamic=True)
    assert torch.equal(compiled(stream, position, 5000), random_bits(stream, position, 5000))
