"""The engine with residual compensation: closer to a BF16 engine than without it."""

import pytest
import torch

from tracefp4.errors import EngineError


def test_compensation_brings_log_probs_closer_to_bf16(make_bench, make_request):
    requests = [make_request(n, 12, max_new_tokens=12) for n in "abcdefgh"]
    errors = {}
    for residual in (0.0, 0.5, 1.0):
        bench = make_bench(spec="nvfp4-w4a4", residual=residual, max_tokens=1024)
        # The reference quantizes weights only: what is left is the error of the activations.
        weights = make_bench(spec="nvfp4-w4a16", plan=None).reference
        found = bench.engine.generate(requests)
        deltas = [weights.score(r) - torch.tensor(r.logprobs) for r in found]
        errors[residual] = float(torch.cat(deltas).abs().mean())
    assert errors[1.0] < errors[0.5] < errors[0.0]


def test_there_must_be_activations_to_compensate(make_bench):
    with pytest.raises(EngineError, match="has none"):
        make_bench(spec="nvfp4-kv4", residual=0.5)
