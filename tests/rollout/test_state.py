"""Linear-attention states: moved by a prefill, updated in place by a decode step, the same tokens either way."""

from __future__ import annotations

import pytest
import torch

from tracefp4.errors import EngineError
from tracefp4.models import layout as layouts
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.state import StatePool

HYBRID = ("qwen3_5_moe", "qwen3_next")


@pytest.fixture
def generic(monkeypatch):
    """Call to build engines whose gated delta nets run as transformers wrote them."""
    return lambda: monkeypatch.setattr(layouts, "DELTA_NETS", ())


def requests(make_request):
    # A prompt of several chunks, samples that share a state, one that starts later, and a prompt of one token.
    return [
        make_request("a", 21, samples=3, max_new_tokens=12),
        make_request("b", 5, max_new_tokens=3),
        make_request("c", 1, max_new_tokens=9),
    ]


def gap(one, other):
    return max(abs(p - q) for a, b in zip(one, other, strict=True) for p, q in zip(a.logprobs, b.logprobs, strict=True))


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("spec", ["bf16", "nvfp4-w4a4-kv4"])
def test_steps_in_place_give_what_transformers_gives(make_bench, make_request, generic, family, spec):
    own = make_bench(family, spec, max_batch=3)
    assert own.engine.layout.deltas.keys() == {0, 2}
    found = own.engine.generate(requests(make_request))
    generic()
    moving = make_bench(family, spec, max_batch=3)
    assert not moving.engine.layout.deltas
    expected = moving.engine.generate(requests(make_request))
    assert [r.response_ids for r in found] == [r.response_ids for r in expected]
    assert gap(found, expected) < 1e-4


@pytest.mark.parametrize("family", HYBRID)
def test_a_decode_step_moves_no_state(make_bench, make_request, monkeypatch, family):
    engine = make_bench(family, "bf16").engine
    moved = []
    scatter = StatePool.scatter
    monkeypatch.setattr(
        StatePool,
        "scatter",
        lambda self, cache, rows, layers: moved.append(layers) or scatter(self, cache, rows, layers),
    )
    engine.generate([make_request("a", 9, max_new_tokens=4)])
    assert moved == [(0, 2), (), (), ()]


def test_only_the_rows_of_the_batch_change(make_bench, make_request):
    engine = make_bench("qwen3_5_moe", "bf16").engine
    engine.generate([make_request("a", 9, max_new_tokens=2)])
    pools = [state for layer in engine.layout.deltas for state in engine.states.of(layer)]
    for state in pools:
        state.fill_(0.5)
    row = engine.states.allocate()
    engine.states.release(row)
    engine.generate([make_request("b", 9, max_new_tokens=5)])
    for state in pools:
        changed = (state != 0.5).flatten(1).any(dim=1)
        assert changed[row] and int(changed.sum()) == 1


@pytest.mark.parametrize("deltas", [True, False])
def test_states_in_bfloat16(make_bench, make_request, generic, deltas):
    """Half the bytes of the matrices, and tokens whose log-probabilities are near."""
    if not deltas:
        generic()
    wide, narrow = (make_bench("qwen3_5_moe", "bf16", state_dtype=d).engine for d in ("float32", "bfloat16"))
    asked = [make_request("a", 9, max_new_tokens=16, temperature=0.0)]
    found, expected = narrow.generate(asked), wide.generate(asked)
    conv = sum(state.nbytes for layer in (0, 2) for state in narrow.states.of(layer)[:1])
    assert wide.states.nbytes - conv == 2 * (narrow.states.nbytes - conv)
    assert found[0].response_ids[:4] == expected[0].response_ids[:4]
    assert 0 < gap(found, expected) < 0.1


def test_a_state_dtype_that_nobody_keeps(make_bench):
    with pytest.raises(EngineError, match="state_dtype is 'float16'; valid are 'float32' and 'bfloat16'"):
        make_bench("qwen3_5_moe", state_dtype="float16")


def test_other_linear_layers_keep_their_state_in_the_cache_object():
    """A pool without steps of its own gathers what was scattered, channels first."""
    layout = describe(tiny_model("qwen3_next"))
    pool = StatePool(layout, 2)
    with pytest.raises(EngineError, match="before the first prefill"):
        pool.of(0)
    cache = pool.gather(None, layout.linear_layers)
    for index in layout.linear_layers:
        cache.layers[index].update_conv_state(torch.randn(1, 6, 4))
        cache.layers[index].update_recurrent_state(torch.randn(1, 2, 3, 5))
    rows = torch.tensor([1])
    pool.scatter(cache, rows, layout.linear_layers)
    assert [tuple(state.shape) for state in pool.of(0)] == [(3, 4, 6), (3, 2, 3, 5)]
    again = pool.gather(rows, layout.linear_layers)
    empty = pool.gather(rows, pool.moved(decode=True))
    for index in layout.linear_layers:
        for name in ("conv_states", "recurrent_states"):
            assert torch.equal(getattr(again.layers[index], name)[0], getattr(cache.layers[index], name)[0])
        assert not empty.layers[index].is_conv_states_initialized[0]


def test_a_step_that_a_layer_skips_is_noticed(make_bench, make_request, monkeypatch):
    engine = make_bench("qwen3_5_moe", "bf16").engine
    layer = engine.model.get_submodule(engine.layout.deltas[2])
    own = layer.forward

    def skip(hidden_states, **kwargs):
        return own(hidden_states, **kwargs) if hidden_states.shape[1] > 1 else torch.zeros_like(hidden_states)

    monkeypatch.setitem(vars(layer), "forward", skip)
    with pytest.raises(EngineError, match=r"site 2\.delta was reached 0 times"):
        engine.generate([make_request("a", 9)])
