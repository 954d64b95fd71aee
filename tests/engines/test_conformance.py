"""One contract for every engine: what a trainer may rely on, whoever generates.

The engines run a tiny model in float32. Then a rollout and a trainer that follows its whole codes differ by summation
order alone, and a row that belongs to another token, or an outcome of another site, shows as a large difference.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import EngineError, FormatError, GuidanceStale, SyncError
from tracefp4.evaluation.gap import score
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import Expectation, decode
from tracefp4.models.binding import bound
from tracefp4.models.coverage import compare, coverage, probe
from tracefp4.models.packing import PackedWeight, digest, model_digest, pack_weight
from tracefp4.models.tiny import tiny_model
from tracefp4.training.sites import TrainerSites


def gap(bench, rollouts, guided=True):
    """Differences of log-probs between a trainer and the rollouts, one array a rollout."""
    records = [bench.record(r) for r in rollouts]
    sites = TrainerSites(bench.layout, bench.spec, "replay")
    with bound(bench.model, sites):
        return score(bench.model, sites, rollouts, guidance=records if guided else None, truth=records).deltas


def tensors(record):
    """Everything that was recorded, by site."""
    return {str(s): (r.planes, r.scales, r.global_scale) for s, r in record.sites.items()}


def same_rows(left, right, rows):
    """Whether two records agree in their first rows."""
    return all(
        torch.equal(a[:rows], b[:rows])
        for site, parts in tensors(left).items()
        for a, b in zip(parts, tensors(right)[site], strict=True)
        if a is not None
    )


def check_complete(bench, rollout):
    record = bench.record(rollout)
    assert record.rows == rollout.rows == len(rollout.tokens) - 1
    assert bool(record.valid.all())
    assert rollout.routes.shape == (rollout.rows, len(bench.layout.moe_layers), bench.layout.top_k)
    assert len(rollout.logprobs) == len(rollout.response_ids)
    assert len(record.sites) == 4 * bench.layout.num_layers


def test_a_chunked_prefill_gives_a_row_for_each_token_but_the_last(served, ask):
    rollouts = served.engine.generate([ask("chunks", 75)])
    check_complete(served, rollouts[0])
    assert max(np.abs(gap(served, rollouts)[0])) < 2e-3


def test_log_probs_are_those_of_the_same_quantized_model(served, ask):
    rollouts = served.engine.generate([ask(f"lp{i}", 5 + 9 * i, temperature=0.7 + 0.3 * i) for i in range(3)])
    records = [served.record(r) for r in rollouts]
    sites = TrainerSites(served.layout, served.spec, "replay")
    for rollout, record, temperature in zip(rollouts, records, (0.7, 1.0, 1.3), strict=True):
        with bound(served.model, sites):
            found = score(served.model, sites, [rollout], guidance=[record], temperature=temperature)
        assert max(np.abs(found.all)) < 2e-3
    # Without guidance too, but where float32 noise turned a code over.
    assert np.median(np.abs(np.concatenate(gap(served, rollouts[1:2], guided=False)))) < 2e-3


def test_a_batch_of_mixed_lengths_is_recorded_completely(served, ask):
    requests = [ask(f"mixed{i}", n, max_new_tokens=m) for i, (n, m) in enumerate([(1, 9), (40, 1), (17, 5), (3, 20)])]
    rollouts = served.engine.generate(requests)
    assert [len(r.response_ids) for r in rollouts] == [9, 1, 5, 20]
    for rollout, delta in zip(rollouts, gap(served, rollouts), strict=True):
        check_complete(served, rollout)
        assert max(np.abs(delta)) < 2e-3


def test_samples_and_repeats_of_a_prompt_carry_the_same_guidance_of_it(served, ask):
    prompt = ask("hit", 45).prompt_ids
    before = served.engine.stats.shared_tokens
    first = served.engine.generate([Request("hit-1", prompt, 1, SamplingParams(max_new_tokens=6, seed=1))])
    again = served.engine.generate([Request("hit-2", prompt, 2, SamplingParams(max_new_tokens=6, seed=2))])
    assert served.engine.stats.shared_tokens - before >= 32
    whole = served.record(first[0])
    for rollout in again:
        check_complete(served, rollout)
        assert same_rows(whole, served.record(rollout), 32)
        assert torch.equal(first[0].routes[:32], rollout.routes[:32])
    assert max(np.abs(np.concatenate(gap(served, again)))) < 2e-3


def test_several_turns_are_one_sequence(served, ask):
    turn = served.engine.generate([ask("turn-1", 20)])[0]
    prompt = (*turn.tokens, 11, 12, 13, 14, 15)
    rollouts = served.engine.generate([Request("turn-2", prompt, 1, SamplingParams(max_new_tokens=7, seed=3))])
    check_complete(served, rollouts[0])
    assert rollouts[0].prompt_ids == prompt
    assert max(np.abs(gap(served, rollouts)[0])) < 2e-3


def test_retractions_are_counted_and_leave_whole_records(served, ask):
    stats = served.engine.stats
    before, invalid = stats.retractions, stats.invalid_rows
    requests = [ask(f"crowd{i}", 8, max_new_tokens=110) for i in range(8)]
    rollouts = served.engine.generate(requests)
    assert served.engine.stats.retractions > before
    records = [served.record(r) for r in rollouts]
    assert [r.rows for r in records] == [117] * 8
    assert served.engine.stats.invalid_rows - invalid == sum(int((~r.valid).sum()) for r in records)
    assert max(np.abs(np.concatenate(gap(served, rollouts)))) < 2e-2


def test_an_abort_leaves_nothing_behind(served, ask):
    engine = served.engine
    aborted = engine.stats.aborted
    engine.add(ask("long", 10, samples=2, max_new_tokens=200))
    engine.add(ask("short", 10, max_new_tokens=3))
    found = []
    while not found:
        found += engine.step()
    dropped = engine.abort("long")
    while engine.busy:
        found += engine.step()
    assert [r.request_id for r in found if r.request_id == "short"] == ["short"]
    assert [r.finish_reason for r in dropped] == ["abort"] * len(dropped)
    assert all(r.guidance is None and r.routes is None for r in dropped)
    assert engine.stats.aborted - aborted == len(dropped)
    shipped = {r.guidance.key for r in found if r.guidance is not None}
    assert set(served.store.keys()) == shipped
    folder = getattr(engine, "folder", None)
    assert folder is None or not list(folder.glob("*.guidance"))
    with pytest.raises(EngineError, match="no request 'long'"):
        engine.abort("long")
    check_complete(served, engine.generate([ask("after", 12)])[0])


def test_the_same_seed_gives_the_same_sample_whatever_runs_beside(served, ask):
    alone = served.engine.generate([ask("seeded", 12, max_new_tokens=12)])[0]
    crowd = served.engine.generate([ask(f"other{i}", 9 + i, max_new_tokens=12, seed=i) for i in range(4)] + [
        ask("seeded", 12, max_new_tokens=12)])  # fmt: skip
    assert crowd[-1].response_ids == alone.response_ids
    assert len({r.response_ids for r in crowd}) == 5


def test_stop_tokens_end_a_sample_and_stay_in_it(served, ask):
    free = served.engine.generate([ask("stop", 12, temperature=0.0, max_new_tokens=6)])[0]
    stop = free.response_ids[2]
    held = served.engine.generate([ask("stop", 12, temperature=0.0, max_new_tokens=6, stop_token_ids=(stop,))])[0]
    assert held.finish_reason == "stop"
    assert held.response_ids[-1] == stop
    assert held.response_ids == free.response_ids[: len(held.response_ids)]
    check_complete(served, held)


def test_guidance_carries_the_weight_version_and_grows_stale(served, ask):
    served.engine.sync(served.state(), 5)
    rollout = served.engine.generate([ask("version", 9)])[0]
    assert served.engine.weight_version == rollout.weight_version == 5
    data = served.store.get(rollout.guidance)
    expect = {"tokens": rollout.tokens, "numerics_hash": served.spec.hash, "plan": "r4-all+mid/s8"}
    assert decode(data, Expectation(**expect, weight_version=5)).weight_version == 5
    with pytest.raises(GuidanceStale):
        decode(data, Expectation(**expect, weight_version=6))


def test_a_refit_and_back_is_identical_byte_for_byte(served, ask):
    numerics = served.spec.weights
    other = tiny_model("qwen3_moe", seed=4, dtype=torch.float32)
    one = served.engine.generate([ask("refit", 20, temperature=0.0)])[0]
    assert served.engine.digest() == model_digest(served.model, served.layout, numerics)
    assert served.engine.sync(served.state(other), 2) == model_digest(other, served.layout, numerics)
    changed = served.engine.generate([ask("refit", 20, temperature=0.0)])[0]
    assert changed.logprobs != one.logprobs
    assert served.engine.sync(served.state(), 1) == model_digest(served.model, served.layout, numerics)
    two = served.engine.generate([ask("refit", 20, temperature=0.0)])[0]
    assert two.tokens == one.tokens
    assert two.logprobs == one.logprobs
    assert same_rows(served.record(one), served.record(two), one.rows)


def test_a_packed_refit_is_identical_byte_for_byte_and_to_one_of_plain_weights(served, ask):
    numerics = served.spec.weights
    other = tiny_model("qwen3_moe", seed=4, dtype=torch.float32)

    def sync(state, version):
        before = served.engine.stats.sync_bytes
        digest = served.engine.sync(state, version)
        sent = served.engine.stats.sync_bytes - before
        return digest, served.engine.generate([ask("form", 20, temperature=0.0)])[0], sent

    plain, one, plain_bytes = sync(served.state(), 1)
    away, changed, _ = sync(served.packed(other), 2)
    packed, two, packed_bytes = sync(served.packed(), 1)
    back, three, _ = sync(served.state(), 1)
    assert plain == packed == back == served.engine.digest() == model_digest(served.model, served.layout, numerics)
    assert away == model_digest(other, served.layout, numerics)
    assert changed.logprobs != one.logprobs
    for rollout in (two, three):
        assert rollout.tokens == one.tokens
        assert rollout.logprobs == one.logprobs
        assert torch.equal(rollout.routes, one.routes)
        assert same_rows(served.record(one), served.record(rollout), one.rows)
    check_complete(served, two)
    # The experts of this model are float32: 32 bits a value, or 4 and 8 for 16 of them, and 32 for an expert.
    experts = [served.state()[name] for name, part in served.packed().items() if isinstance(part, PackedWeight)]
    saved = sum(tensor.nbytes - tensor.numel() * 9 // 16 - 4 * tensor.shape[0] for tensor in experts)
    assert plain_bytes - packed_bytes == saved > 0


def test_codes_that_no_rounding_gives_are_served_as_they_come(served, ask):
    """As of weights quantized after training: their values, quantized again, would give other codes."""
    state = dict(served.packed())
    name = next(name for name, weight in state.items() if isinstance(weight, PackedWeight))
    state[name].codes[:, ::2] ^= 0x11
    expected = digest({n: tuple(w.parts()) if isinstance(w, PackedWeight) else (w,) for n, w in state.items()})
    assert expected != model_digest(served.model, served.layout, served.spec.weights)
    assert served.engine.sync(state, 2) == served.engine.digest() == expected
    check_complete(served, served.engine.generate([ask("own", 12)])[0])


def test_packed_weights_that_do_not_fit_are_refused(served, ask):
    state = dict(served.packed())
    name = next(name for name, weight in state.items() if isinstance(weight, PackedWeight))
    whole = state[name]
    mx = pack_weight(served.state()[name], get_spec("mxfp4-w4a4-kv4").weights)
    with pytest.raises(SyncError, match="comes packed as mxfp4"):
        served.engine.sync(state | {name: mx}, 2)
    with pytest.raises(SyncError, match="sync again"):
        served.engine.generate([ask("none", 4)])
    with pytest.raises(FormatError, match="scales' is uint8"):
        served.engine.sync(state | {name: replace(whole, scales=whole.scales[:1])}, 2)
    few = replace(whole, codes=whole.codes[:1], scales=whole.scales[:1], global_scale=whole.global_scale[:1])
    with pytest.raises(SyncError, match="comes packed with shape"):
        served.engine.sync(state | {name: few}, 2)
    # One projection packed and the other one plain is a state like any other.
    mixed = served.state() | {name: whole}
    assert served.engine.sync(mixed, 3) == model_digest(served.model, served.layout, served.spec.weights)


def test_a_sync_that_does_not_fit_is_refused_until_one_does(served, ask):
    state = served.state()
    name = next(iter(state))
    with pytest.raises(SyncError, match="missing"):
        served.engine.sync({k: v for k, v in state.items() if k != name}, 2)
    with pytest.raises(SyncError, match="sync again"):
        served.engine.generate([ask("none", 4)])
    with pytest.raises(SyncError, match="shape"):
        served.engine.sync(state | {name: state[name][:1]}, 2)
    with pytest.raises(SyncError, match="bfloat16"):
        served.engine.sync(state | {name: state[name].bfloat16()}, 2)
    served.engine.sync(state, 3)
    check_complete(served, served.engine.generate([ask("again", 4)])[0])


def test_it_covers_what_the_trainer_covers(served, ask):
    served.engine.generate([ask("cover", 4)])
    sites = TrainerSites(served.layout, served.spec)
    with bound(served.model, sites), probe(served.model) as calls, torch.no_grad():
        served.model(input_ids=torch.arange(8)[None], use_cache=False)
        mine = coverage(served.model, served.spec, calls)
    compare(served.engine.coverage(), mine)


def test_what_cannot_run_is_refused_with_a_sentence(served, ask):
    engine = served.engine
    with pytest.raises(EngineError, match="stop strings"):
        engine.generate([ask("text", 4, stop=("x",))])
    with pytest.raises(EngineError, match="more than the whole KV pool"):
        engine.generate([ask("huge", 400, max_new_tokens=400)])
    with pytest.raises(EngineError, match="has no prompt"):
        engine.generate([Request("empty", ())])
    assert not engine.busy


def test_without_guidance_rollouts_still_have_routes(served, ask):
    rollout = served.engine.generate([ask("plain", 9)], guidance=False)[0]
    assert rollout.guidance is None
    assert rollout.routes is not None
    assert served.store.keys() == ()
