"""Top-k log-probs of each response position: off by default, equal to the reference's distribution when on."""

import pytest
import torch

from tracefp4.errors import EngineError
from tracefp4.models.tiny import VOCAB
from tracefp4.rollout.sampler import Draw, top_logprobs


def test_off_by_default_and_nothing_else_changes(make_bench, make_request):
    plain, asked = make_bench().engine, make_bench().engine
    (without,) = plain.generate([make_request("a", 7, max_new_tokens=6)])
    (found,) = asked.generate([make_request("a", 7, max_new_tokens=6, top_logprobs=5)])
    assert without.top is None and found.top is not None
    assert (without.response_ids, without.logprobs) == (found.response_ids, found.logprobs)
    assert found.top.ids.shape == found.top.logprobs.shape == (6, 5)
    assert (found.top.ids.dtype, found.top.logprobs.dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_the_distribution_that_was_sampled_from(make_bench, make_request, temperature):
    bench = make_bench()
    request = make_request("b", 9, samples=2, max_new_tokens=7, temperature=temperature, top_logprobs=VOCAB)
    for rollout in bench.engine.generate([request]):
        table, _ = bench.reference(rollout.tokens)
        rows = torch.arange(len(rollout.prompt_ids) - 1, rollout.rows)
        expected = torch.log_softmax(table[rows] / temperature, -1)
        ids, logprobs = rollout.top.ids.long(), rollout.top.logprobs
        torch.testing.assert_close(logprobs, expected.gather(-1, ids), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(rows)))
        assert (logprobs.diff(dim=-1) <= 0).all()
        chosen = (ids == torch.tensor(rollout.response_ids)[:, None]).nonzero()[:, 1]
        assert logprobs[torch.arange(len(rows)), chosen].tolist() == pytest.approx(rollout.logprobs, abs=1e-6)


def test_requests_of_one_batch_may_ask_for_different_numbers(make_bench, make_request):
    engine = make_bench().engine
    requests = [make_request(n, 5, max_new_tokens=4, top_logprobs=k) for n, k in (("a", 0), ("b", 3), ("c", 8))]
    found = engine.generate(requests)
    assert found[0].top is None
    assert [r.top.ids.shape[1] for r in found[1:]] == [3, 8]
    alone = make_bench().engine.generate(requests[1:2])[0]
    assert torch.equal(alone.top.ids, found[1].top.ids)


def test_retraction_loses_none(make_bench, make_request):
    requests = [
        make_request("a", 9, samples=2, max_new_tokens=12, top_logprobs=4),
        make_request("b", 7, max_new_tokens=14, top_logprobs=4),
    ]
    tight = make_bench(max_tokens=28)
    found = tight.engine.generate(requests)
    assert tight.engine.stats.retractions > 0
    assert all(len(r.top.ids) == len(r.response_ids) for r in found)


def test_more_than_the_vocabulary_is_refused(make_bench, make_request):
    with pytest.raises(EngineError, match=f"0 to {VOCAB}"):
        make_bench().engine.generate([make_request("a", 5, top_logprobs=VOCAB + 1)])


def test_greedy_rows_are_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ones = torch.ones(1, dtype=torch.int64)
    draw = Draw(ones, ones, torch.zeros(1), ones * 0, torch.ones(1))
    ids, logprobs = top_logprobs(logits, draw, 2)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, [1, 2]])
