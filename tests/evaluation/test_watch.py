"""Where the time of a rollout goes: what is counted is there, adds up, and is the host's or the device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tracefp4.evaluation import bench_rollout
from tracefp4.evaluation import watch as watch_module
from tracefp4.evaluation.bench import Bench
from tracefp4.evaluation.bench_engine import slice_of
from tracefp4.evaluation.watch import watched
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.rollout import runner
from tracefp4.rollout.harvest import Harvester
from tracefp4.rollout.loop import Loop
from tracefp4.rollout.runner import Runner

PARTS = ("prefill_ms", "decode_ms", "rest_ms")
LOAD = bench_rollout.Load(2, 2, 8, 8)


@pytest.fixture
def engine():
    made = LOAD.engine(slice_of("tiny", 1, LOAD.context), "bf16", None, torch.device("cpu"), MemoryStore())
    made.generate(LOAD.requests(0))
    return made


def seen(engine, load=LOAD):
    with watched(engine) as watch:
        start = watch_module.time.perf_counter()
        rollouts = engine.generate(load.requests(1))
        return watch, watch.numbers(watch_module.time.perf_counter() - start), rollouts


def test_rows_of_a_rollout_say_where_the_time_went(device, monkeypatch):
    monkeypatch.setattr(Bench, "bandwidth", 1e9)
    monkeypatch.setattr(Bench, "launch", 1e-6)
    bench = Bench(device, repeats=1)
    bench_rollout.bench_rollout(bench, "tiny", prompts=2, samples=2, new_tokens=8, prompt_length=8, layers=1)
    *arms, claimed = bench.to_dict()["rows"]
    assert not bench.failures and len(arms) == 3
    for row in arms:
        numbers = row["numbers"]
        assert numbers["steps"] == 7 and all(numbers[part] > 0 for part in PARTS)
        assert sum(numbers[part] for part in PARTS) == pytest.approx(numbers["total_ms"])
        assert numbers["total_ms"] == pytest.approx(1e3 * 4 * 8 / row["value"])
        assert 0 < numbers["host_us"] <= numbers["between_launches_us"] <= numbers["between_launches_p95_us"]
        # The six times between seven launches, and nothing else, are in the time of decoding.
        assert numbers["between_launches_us"] * 3 <= 1e3 * numbers["decode_ms"]
        assert ("device_step_us" in numbers) == (device.type == "cuda") == ("device" in row["detail"])
        assert f"7 steps {numbers['decode_ms']:.0f} ms" in row["detail"]
    assert claimed["numbers"]["frames"] == 4 and claimed["numbers"]["frame_bytes"] > 0
    seconds = (arms[-1]["numbers"]["total_ms"] + claimed["numbers"]["claim_ms"]) / 1e3
    assert claimed["value"] == pytest.approx(4 * 8 / seconds)


@pytest.fixture
def clock(clock, monkeypatch):
    """The clock of whoever watches."""
    monkeypatch.setattr(watch_module, "time", clock)
    return clock


def test_gathering_what_was_recorded_is_counted_by_itself(engine, monkeypatch, clock):
    gather, take, calls = Harvester.gather, Harvester.take, []

    def slow(self, sequences, *args):
        if sequences:
            calls.append(clock.sleep(0.1))
        return gather(self, sequences, *args)

    def late(self, *, wait):
        if wait:
            clock.sleep(0.1)
        return take(self, wait=wait)

    monkeypatch.setattr(Harvester, "gather", slow)
    monkeypatch.setattr(Harvester, "take", late)
    _, numbers, _ = seen(engine)
    assert calls and numbers["gather_ms"] == pytest.approx(200 * len(calls), rel=0.2)
    assert numbers["rest_ms"] + numbers["decode_ms"] > numbers["gather_ms"]


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_for_results_is_not_the_hosts_work(engine, monkeypatch, clock, overlap):
    depart, late = runner._depart, SimpleNamespace(synchronize=lambda: clock.sleep(0.1))
    monkeypatch.setattr(runner, "_depart", lambda result: (depart(result)[0], late))
    monkeypatch.setattr(engine._loop, "_overlap", overlap)
    _, numbers, _ = seen(engine)
    # One wait for first tokens, and one for each step; nobody waits twice.
    assert numbers["prefill_ms"] > 100 and numbers["decode_ms"] > 7 * 100
    assert 90e3 < numbers["between_launches_us"] - numbers["host_us"] < 150e3
    assert numbers["host_us"] < 100e3


def test_a_host_that_is_slow_is_found_in_its_own_work_and_at_the_slow_step(engine, monkeypatch, clock):
    advance, calls = engine.scheduler.decode, []

    def slow(ahead=0):
        calls.append(ahead)
        clock.sleep(0.2 if len(calls) == 4 else 0.02)
        return advance(ahead)

    monkeypatch.setattr(engine.scheduler, "decode", slow)
    _, numbers, _ = seen(engine)
    assert numbers["host_us"] > 20e3 and numbers["host_us"] == pytest.approx(numbers["between_launches_us"], rel=0.01)
    assert numbers["between_launches_p95_us"] > 100e3 > numbers["between_launches_us"]


def test_prefills_between_steps_are_no_part_of_a_step(engine, monkeypatch, clock):
    """A second prompt that has to wait: its prefill is counted as one, and no step gets longer by it."""
    prefill = engine._runner.prefill
    monkeypatch.setattr(engine._runner, "prefill", lambda chunks: (clock.sleep(0.3), prefill(chunks))[1])
    with watched(engine) as watch:
        engine.add(LOAD.requests(1)[0])
        engine.step()
        engine.step()
        engine.add(LOAD.requests(2)[1])
        while engine.busy:
            engine.step()
    numbers = watch.numbers(1.0)
    assert numbers["prefill_ms"] > 600 > 3 * numbers["decode_ms"]
    assert numbers["between_launches_p95_us"] < 300e3


def test_watching_changes_no_token_and_ends(engine):
    expected = engine.generate(LOAD.requests(1))
    _, _, found = seen(engine)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert engine._loop.begin.__func__ is Loop.begin and engine._runner.launch.__func__ is Runner.launch


def test_one_token_each_has_no_steps(engine):
    watch, numbers, _ = seen(engine, bench_rollout.Load(2, 1, 8, 1))
    assert numbers["steps"] == 0 == numbers["decode_ms"] and watch.launches == []
    assert "between_launches_us" not in numbers and numbers["rest_ms"] > 0
