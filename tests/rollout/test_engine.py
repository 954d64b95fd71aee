"""Requests through the engine: order, stopping, aborting, retraction, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tracefp4.core import Kind, Request, SamplingParams
from tracefp4.errors import ConfigError, EngineError, NonFiniteError
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.models.tiny import VOCAB, tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.rollout.loop import HOLD_STEPS
from tracefp4.rollout.registry import engine_names, make_engine
from tracefp4.rollout.runner import Flight, Runner


class Letters:
    """A tokenizer of 26 letters, as far as the engine needs one."""

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + i % 26) for i in ids)


def assert_close(one, other, tolerance=1e-4):
    assert one.response_ids == other.response_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


def assert_empty(engine) -> None:
    assert not engine.busy
    assert engine.pages.free == engine.pages.num_pages and engine.states.free == engine.states.rows


def test_rollouts_come_in_the_order_of_requests_and_samples(make_bench, make_request):
    engine = make_bench().engine
    requests = [make_request(n, 4 + 3 * i, samples=1 + i, max_new_tokens=9 - 3 * i) for i, n in enumerate("abc")]
    seen = []
    rollouts = engine.generate(requests, progress=seen.append)
    assert [(r.request_id, r.sample) for r in rollouts] == [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("c", 2)]
    assert all(len(r.response_ids) == len(r.logprobs) and r.finish_reason == "length" for r in rollouts)
    assert all(r.routes.shape == (r.rows, 2, 2) and r.routes.dtype is torch.uint8 for r in rollouts)
    assert len({r.response_ids for r in rollouts if r.request_id == "c"}) == 3
    assert seen == sorted(seen) and seen[-1] == 6
    assert_empty(engine)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_company_changes_nothing(make_bench, make_request, family):
    wanted = make_request("a", 9, samples=2)
    alone = make_bench(family, max_batch=1).engine.generate([wanted])
    others = [make_request("b", 17, seed=1, samples=3), make_request("c", 3, seed=2, max_new_tokens=13)]
    crowd = make_bench(family, max_batch=16, page_size=8).engine.generate([*others, wanted])
    for one, other in zip(alone, crowd[-2:], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_a_shared_prompt_equals_one_of_its_own(make_bench, make_request, family):
    shared = make_request("a", 10, samples=3)
    bench = make_bench(family)
    first, *_ = bench.engine.generate([shared])
    assert bench.engine.stats.prefill_tokens == 10 and bench.engine.stats.shared_tokens == 20
    (own,) = make_bench(family).engine.generate([replace(shared, samples=1)])
    assert_close(first, own)
    assert torch.equal(first.routes, own.routes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_retraction_changes_no_token(make_bench, make_request, family):
    requests = [make_request("a", 9, samples=2, max_new_tokens=12), make_request("b", 7, max_new_tokens=14)]
    calm, tight = make_bench(family), make_bench(family, max_tokens=28)
    expected, found = calm.engine.generate(requests), tight.engine.generate(requests)
    assert calm.engine.stats.retractions == 0 and tight.engine.stats.retractions > 0
    for one, other in zip(expected, found, strict=True):
        assert_close(one, other)
        assert tight.record(other).valid.all()
    assert_empty(tight.engine)


def test_stop_token_ids_and_eos_end_a_sequence(make_bench, make_request):
    free = make_request("a", 6, max_new_tokens=20)
    (whole,) = make_bench().engine.generate([free])
    third = whole.response_ids[2]
    stop = next(i for i, t in enumerate(whole.response_ids) if t == third)
    ended = replace(free, sampling=replace(free.sampling, stop_token_ids=(third,)))
    (by_id,) = make_bench().engine.generate([ended])
    (by_eos,) = make_bench(tokenizer=Letters(eos_token_id=third)).engine.generate([free])
    for rollout in (by_id, by_eos):
        assert rollout.response_ids == whole.response_ids[: stop + 1] and rollout.finish_reason == "stop"
    assert whole.finish_reason == "length"


def test_a_stop_string_may_span_tokens(make_bench, make_request):
    free = make_request("a", 6, max_new_tokens=20)
    (whole,) = make_bench().engine.generate([free])
    text = Letters().decode(list(whole.response_ids), False)
    stop = text[3:6]
    end = text.index(stop) + 3
    request = replace(free, sampling=replace(free.sampling, stop=("nowhere to be found", stop)))
    (rollout,) = make_bench(tokenizer=Letters()).engine.generate([request])
    assert rollout.response_ids == whole.response_ids[:end] and rollout.finish_reason == "stop"
    with pytest.raises(EngineError, match="without a tokenizer"):
        make_bench().engine.generate([request])
    with pytest.raises(EngineError, match="empty stop string"):
        make_bench(tokenizer=Letters()).engine.generate([replace(free, sampling=replace(free.sampling, stop=("",)))])


def test_one_token_is_enough(make_bench, make_request):
    bench = make_bench()
    (rollout,) = bench.engine.generate([make_request("a", 1, max_new_tokens=1)])
    assert rollout.rows == 1 and bench.record(rollout).rows == 1
    assert_empty(bench.engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_abort_leaves_nothing(make_bench, make_request, family, steps):
    bench = make_bench(family, max_batch=2, prefill_chunk=4)
    engine = bench.engine
    stays, goes = make_request("stays", 5, max_new_tokens=9), make_request("goes", 11, samples=3, max_new_tokens=9)
    engine.add(goes)
    engine.add(stays)
    for _ in range(steps):
        assert engine.step() == []
    dropped = engine.abort("goes")
    assert [d.sample for d in dropped] == [0, 1, 2] and {d.finish_reason for d in dropped} == {"abort"}
    assert all(d.guidance is None and len(d.logprobs) == len(d.response_ids) for d in dropped)
    finished = []
    while engine.busy:
        finished += engine.step()
    (expected,) = make_bench(family).engine.generate([stays])
    assert_close(finished[0], expected)
    assert len(finished) == 1 and engine.stats.aborted == 3
    assert_empty(engine)
    assert bench.store.keys() == (finished[0].guidance.key,)
    with pytest.raises(EngineError, match="no request 'goes'"):
        engine.abort("goes")


def _same(a, b) -> None:
    """Equal but for the last bits, which depend on how many rows a product has, that is on who decodes beside whom."""
    for one, other in zip(a, b, strict=True):
        assert (one.request_id, one.sample, one.finish_reason) == (other.request_id, other.sample, other.finish_reason)
        assert_close(one, other, 1e-5)
        assert torch.equal(one.routes, other.routes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("limits", [{}, {"max_batch": 3}, {"max_tokens": 64}], ids=["roomy", "few rows", "few pages"])
def test_looking_ahead_changes_nothing(make_bench, make_request, family, limits):
    """Ends by length and by a stop token, admission while others decode, retraction."""
    requests = [make_request(n, 4 + 3 * i, samples=2, max_new_tokens=14 - 3 * i) for i, n in enumerate("abcd")]
    plain = make_bench(family, overlap=False, **limits)
    first = plain.engine.generate(requests)
    stop = first[0].response_ids[4]
    requests = [replace(r, sampling=replace(r.sampling, stop_token_ids=(stop,))) for r in requests]
    expected = plain.engine.generate(requests)
    assert {r.finish_reason for r in expected} == {"stop", "length"}
    ahead = make_bench(family, overlap=True, **limits)
    _same(ahead.engine.generate(requests), expected)
    again = ahead.engine.generate(requests)
    _same(again, expected)
    for one, other in zip(again, expected, strict=True):
        a, b = ahead.record(one), plain.record(other)
        assert a.valid.all() and b.valid.all()
        for site in b.sites:
            for part in ("planes", "scales"):
                mine, theirs = (getattr(record.sites[site], part) for record in (a, b))
                assert (mine == theirs).float().mean() > 0.98, (site, part)
    assert_empty(ahead.engine)
    assert ahead.engine.stats.decode_tokens == plain.engine.stats.decode_tokens - sum(
        len(r.response_ids) - 1 for r in first
    ) + sum(len(r.response_ids) - 1 for r in expected)


def test_the_next_step_is_launched_before_the_last_one_lands(make_bench, make_request, monkeypatch):
    order = []
    launch, land = Runner.launch, Flight.land
    monkeypatch.setattr(Runner, "launch", lambda self, *a: order.append("launch") or launch(self, *a))
    monkeypatch.setattr(Flight, "land", lambda self: order.append("land") or land(self))
    make_bench(overlap=True).engine.generate([make_request("a", 4, max_new_tokens=5)])
    # The first landing is that of the token after the prompt; the last step is not followed by another.
    assert order == ["land", "launch", "launch", "land", "launch", "land", "launch", "land", "land"]


def test_a_request_can_be_given_up_while_its_step_is_in_flight(make_bench, make_request):
    engine = make_bench(overlap=True, max_tokens=1024).engine
    stays, goes = make_request("stays", 5, max_new_tokens=12), make_request("goes", 5, max_new_tokens=12)
    engine.add(goes)
    engine.add(stays)
    for _ in range(4):
        assert engine.step() == []
    (dropped,) = engine.abort("goes")
    assert dropped.finish_reason == "abort" and len(dropped.response_ids) == 4
    finished = []
    while engine.busy:
        finished += engine.step()
    (expected,) = make_bench(overlap=False).engine.generate([stays])
    assert_close(finished[0], expected)
    assert_empty(engine)


def _steps_until(engine, count: int) -> list[int]:
    """The step after which each of ``count`` rollouts came."""
    steps: list[int] = []
    number = 0
    while len(steps) < count:
        number += 1
        steps += [number] * len(engine.step())
    return steps


def test_sequences_that_end_together_are_gathered_together(make_bench, make_request):
    engine = make_bench(max_tokens=1024).engine
    long = HOLD_STEPS + 12
    for name, new in {"a": 3, "b": 5, "c": 12, "d": long}.items():
        engine.add(make_request(name, 4, max_new_tokens=new))
    first = _steps_until(engine, 4)
    # The first ends in step 2 (its first token comes with the prefill), so it and those after it come 16 steps later.
    assert first == [2 + HOLD_STEPS] * 3 + [long - 1]
    assert_empty(engine)


def test_nobody_waits_for_pages_of_sequences_that_ended(make_bench, make_request):
    engine = make_bench(max_batch=2, max_tokens=1024).engine
    for name, new in {"a": 3, "b": 12, "c": 3}.items():
        engine.add(make_request(name, 4, max_new_tokens=new))
    assert _steps_until(engine, 3)[0] == 2
    assert_empty(engine)


def test_a_sample_that_ended_and_was_not_returned_can_be_given_up(make_bench, make_request):
    bench = make_bench(max_tokens=1024)
    engine = bench.engine
    engine.add(make_request("goes", 4, max_new_tokens=3))
    engine.add(make_request("stays", 4, max_new_tokens=9))
    for _ in range(4):
        assert engine.step() == []
    (dropped,) = engine.abort("goes")
    assert dropped.finish_reason == "length" and len(dropped.response_ids) == 3 and dropped.guidance is None
    assert _steps_until(engine, 1) and len(bench.store.keys()) == 1
    assert_empty(engine)


def test_step_by_step_equals_generate(make_bench, make_request):
    requests = [make_request("a", 8), make_request("b", 5, samples=2)]
    expected = make_bench().engine.generate(requests)
    engine, found = make_bench().engine, []
    engine.add(requests[0])
    found += engine.step() + engine.step()
    engine.add(requests[1])
    with pytest.raises(EngineError, match="in flight already"):
        engine.add(requests[1])
    with pytest.raises(EngineError, match="in flight"):
        engine.generate(requests)
    while engine.busy:
        found += engine.step()
    for one, other in zip(expected, sorted(found, key=lambda r: (r.request_id, r.sample)), strict=True):
        assert_close(one, other)


def test_logprobs_are_those_before_truncation(make_bench, make_request):
    bench = make_bench()
    request = make_request("a", 8, top_k=2, top_p=0.6, temperature=0.8)
    (rollout,) = bench.engine.generate([request])
    table, _ = bench.reference(rollout.tokens)
    whole = torch.log_softmax(table[7:] / 0.8, -1)
    tokens = torch.tensor(rollout.response_ids)
    torch.testing.assert_close(torch.tensor(rollout.logprobs), whole[torch.arange(8), tokens], atol=1e-4, rtol=0)
    assert (whole.topk(2, -1).indices == tokens[:, None]).any(-1).all()
    assert bench.engine.capabilities.truncated_sampling


def test_seeds_decide_and_ids_stand_in_for_them(make_bench, make_request):
    one = make_request("a", 8, seed=None)
    same, again = (make_bench().engine.generate([one])[0] for _ in range(2))
    other = make_bench().engine.generate([replace(one, id="b")])[0]
    seeded = make_bench().engine.generate([make_request("a", 8, seed=1)])[0]
    assert same.response_ids == again.response_ids
    assert len({r.response_ids for r in (same, other, seeded)}) == 3


BAD_REQUESTS = {
    "no prompt": Request("x", ()),
    "0 samples": Request("x", (1,), samples=0),
    f"token id {VOCAB}": Request("x", (1, VOCAB)),
    "max_new_tokens = 0": Request("x", (1,), sampling=SamplingParams(max_new_tokens=0)),
    "temperature = -1": Request("x", (1,), sampling=SamplingParams(temperature=-1.0)),
    "top_p = 0": Request("x", (1,), sampling=SamplingParams(top_p=0.0)),
    "top_k = -3": Request("x", (1,), sampling=SamplingParams(top_k=-3)),
    "raise max_tokens to 516": Request("x", (1, 2), samples=2, sampling=SamplingParams(max_new_tokens=510)),
    "positions for 2048": Request("x", (1, 2), sampling=SamplingParams(max_new_tokens=2047)),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_requests_that_can_never_run_are_refused(make_bench, make_request, message):
    engine = make_bench().engine
    with pytest.raises(EngineError, match=message):
        engine.generate([make_request("fine", 4), BAD_REQUESTS[message]])
    assert_empty(engine)
    assert engine.stats.steps == 0


def test_settings_that_cannot_work_are_refused(make_bench):
    with pytest.raises(EngineError, match=r"max_tokens = 30 is no multiple of page_size = 4; take 28"):
        make_bench(max_tokens=30)
    with pytest.raises(EngineError, match="max_batch is 0"):
        make_bench(max_batch=0)
    with pytest.raises(EngineError, match="no store"):
        EmbeddedEngine(tiny_model("mixtral"), None, get_spec("nvfp4-w4a4"), Plan.parse("r1-all/s8"))
    with pytest.raises(ConfigError, match="selects no site"):
        make_bench(spec="nvfp4-w4a16")


def test_nan_logits_stop_the_engine_and_leave_nothing(make_bench, make_request):
    bench = make_bench(spec="bf16")
    broken = {name: p.clone() for name, p in bench.reference.model.named_parameters()}
    broken["lm_head.weight"][5] = float("nan")
    bench.engine.sync(broken, 1)
    with pytest.raises(NonFiniteError, match="request 'a', token 6: the logits are NaN under weights of version 1"):
        bench.engine.generate([make_request("a", 6)])
    assert_empty(bench.engine)


def test_a_model_that_belongs_to_the_engine_cannot_be_called(make_bench):
    model = tiny_model("mixtral")
    engine = EmbeddedEngine(model, None, get_spec("bf16"), max_tokens=64)
    with pytest.raises(EngineError, match="from outside of the engine"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    engine.close()
    model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_engines_are_found_by_name(make_request):
    from tracefp4.config import EngineConfig

    arguments = {
        "model": tiny_model("mixtral"),
        "tokenizer": None,
        "spec": get_spec("bf16"),
        "plan": None,
        "store": None,
    }
    engine = make_engine("embedded", **arguments, settings=EngineConfig(max_tokens=64))
    (rollout,) = engine.generate([make_request("a", 3)])
    assert len(rollout.response_ids) == 8 and "embedded" in engine_names()
    assert not engine.capabilities.kinds and engine.capabilities.routes
    with pytest.raises(ConfigError, match="did you mean 'embedded'"):
        make_engine("embeded", **arguments, settings=EngineConfig())


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "gpt_oss"])
def test_every_site_of_the_spec_is_reached_and_quantized(make_bench, make_request, family):
    from tracefp4.models.coverage import coverage, probe

    engine = make_bench(family, dtype=torch.bfloat16).engine
    with probe(engine.model) as calls:
        engine.generate([make_request("a", 5)])
    table = coverage(engine.model, engine.spec, calls)  # raises for a module that stayed in bfloat16
    assert {row.kind for row in table.rows if row.kind in set(Kind)} == {
        s.site.kind for s in engine.capture.table.shapes
    }
