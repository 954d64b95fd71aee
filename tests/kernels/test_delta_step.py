"""A hybrid engine with kernels samples what the engine without them samples."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.formats.spec import get_spec
from tracefp4.kernels import convolution, delta_rule
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_tokens_of_the_engine_without_kernels(family, state_dtype, device, monkeypatch):
    def generate():
        model = tiny_model(family, seed=3, dtype=torch.float32, num_hidden_layers=2, layer_types=KINDS)
        engine = EmbeddedEngine(
            model, None, get_spec("bf16"), device=device, max_tokens=64, page_size=4, max_batch=4,
            state_dtype=state_dtype,
        )  # fmt: skip
        return engine.generate([Request("a", tuple(range(3, 9)), 2, SamplingParams(max_new_tokens=4, seed=1))])

    calls = []
    for module, name in ((convolution, "convolve"), (delta_rule, "step")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own, name=name: calls.append(name) or own(*args))
    found = generate()
    # Once a step; a step that is replayed from a graph calls nothing.
    assert calls and calls == ["convolve", "step"] * (len(calls) // 2)
    calls.clear()
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    expected = generate()
    assert not calls
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids == other.response_ids
        # A state that is rounded to bfloat16 may round the other way.
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4 if state_dtype == "float32" else 2e-2)


def test_every_configuration_of_the_benchmark_runs(device, monkeypatch):
    from tracefp4.evaluation import bench_delta
    from tracefp4.evaluation.bench import Bench

    if device.type == "cpu":
        monkeypatch.setattr(bench_delta, "need_cuda", lambda *_: None)
        monkeypatch.setattr(Bench, "time", lambda self, works: [work() for work in works] and 1e-6)
        monkeypatch.setattr(Bench, "bandwidth", 1e9)
        for name, value in {"KEY_HEADS": 1, "HEADS": 2, "ROWS": 3}.items():
            monkeypatch.setattr(bench_delta, name, value)
    bench = Bench(device, repeats=1)
    bench_delta.bench_delta(bench, (2,))
    assert not bench.failures
    assert [(row.name, row.arm) for row in bench.rows] == [
        ("short convolution B2", "bf16"),
        ("delta rule B2", "states float32"),
        ("delta rule B2", "states bfloat16"),
    ]
    rule, narrow = (row.bound for row in bench.rows[1:])
    assert 1.9 < rule / narrow < 2.0


KINDS = ["linear_attention", "full_attention"]
