"""What external engines share, without any engine."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from tracefp4.core import Handle, Kind, Request, SamplingParams, Site
from tracefp4.errors import ConfigError, EngineError, FormatError, GuidanceCorrupt, GuidanceMissing, SyncError
from tracefp4.formats.spec import SPECS, get_spec
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.frame import decode
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.coverage import engine_coverage, reported_formats
from tracefp4.integrations.engines.experts import EmulatedExperts, place_packed
from tracefp4.integrations.engines.handover import Folder, put_routes, read_routes
from tracefp4.integrations.engines.host import Host
from tracefp4.integrations.engines.recorder import Recorder, tickets
from tracefp4.integrations.engines.selfcheck import probe_prompt, self_check
from tracefp4.integrations.engines.settings import EngineSettings, dump_spec, load_spec, read_settings
from tracefp4.integrations.engines.sites import check_plan, render_sites
from tracefp4.integrations.engines.weights import Names, Served, hollow
from tracefp4.integrations.engines.wire import (
    Abort,
    Ask,
    Channel,
    Close,
    Failed,
    Finished,
    Load,
    Loaded,
    Report,
    Sample,
    SiteLine,
)
from tracefp4.models.binding import bound
from tracefp4.models.coverage import compare, coverage
from tracefp4.models.layout import describe
from tracefp4.models.operands import widened
from tracefp4.models.packing import PackedState, model_digest, pack_weight
from tracefp4.models.tiny import tiny_model
from tracefp4.quantizers.nearest import quantize_nearest
from tracefp4.rollout.embedded import EmbeddedEngine
from tracefp4.training.sites import TrainerSites

SPEC = get_spec("nvfp4-w4a4-kv4")
SAMPLE = Sample("a.0", [1, 2], 1.0, 1.0, 0, 4, [], [9], 7, True)


@pytest.fixture
def channels():
    left, right = (Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path)
    yield made
    made.remove()


def make_recorder(plan="r4-all+mid/s8", store=None, spec=SPEC, step_tokens=8):
    layout = describe(tiny_model("qwen3_moe"))
    return Recorder(
        layout,
        spec,
        Plan.parse(plan) or None,
        MemoryStore() if store is None else store,
        slots=64,
        step_tokens=step_tokens,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def forward(recorder, slots, tokens, seed=0):
    """What a forward pass of tokens at positions 0.. does; returns what entered each site."""
    layout, count = recorder.layout, len(tokens)
    torch.manual_seed(seed)
    slots, seen = torch.tensor(slots), {}
    recorder.begin(slots, torch.arange(count), torch.tensor(tokens))
    for layer in range(layout.num_layers):
        k = torch.randn(count, layout.kv_heads, layout.head_dim).bfloat16()
        v = torch.randn(count, layout.kv_heads, layout.v_head_dim).bfloat16()
        seen[layer, Kind.K], seen[layer, Kind.V] = k, v
        recorder.key_value(layer, slots, k, v)
        x = torch.randn(count, layout.hidden).bfloat16()
        h = torch.randn(count * layout.top_k, layout.intermediate).bfloat16()
        recorder.quantize(Site(layer, Kind.EXPERTS_IN), x)
        recorder.quantize(Site(layer, Kind.EXPERTS_MID), h, torch.arange(count * layout.top_k))
        seen[layer, Kind.EXPERTS_IN], seen[layer, Kind.EXPERTS_MID] = x, h
        recorder.route(layer, torch.full((count, layout.top_k), layer))
    recorder.keep(recorder.end())
    return seen


# Messages -----------------------------------------------------------------------------------------------------------


def test_messages_arrive_as_they_were_sent(channels):
    mine, theirs = channels
    for order in (SAMPLE, Abort("x"), Ask(), Close()):
        mine.send(order)
        assert theirs.receive_order(1) == order
    reply = Finished("a", [1, 2], [-0.1, -1e-300], "stop", 3)
    theirs.send(reply)
    theirs.send(Failed("why", "b"))
    assert mine.receive(1) == reply
    assert mine.receive(1) == Failed("why", "b")
    assert mine.receive(0) is None
    assert mine.receive(0.01) is None


def test_two_ends_that_send_much_at_once_do_not_wait_for_each_other(channels):
    mine, theirs = channels
    large = Finished("a", list(range(300_000)), [0.5] * 1000, "length", 0)

    def exchange(end):
        end.send(large)
        return end.receive(10)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(exchange, (mine, theirs)))
    assert [len(reply.tokens) for reply in found] == [300_000, 300_000]


def test_a_closed_connection_is_an_error_of_one_sentence(channels):
    mine, theirs = channels
    theirs.close()
    with pytest.raises(EngineError, match="is gone"):
        mine.receive(1)


class Echo:
    """A backend that answers at once, but for what is aborted."""

    def __init__(self):
        self.held, self.closed = {}, False

    def submit(self, sample):
        self.held[sample.key] = sample

    def abort(self, key):
        self.held.pop(key, None)

    def poll(self, timeout):
        done = [Finished(k, s.tokens, [0.0], "stop", 1) for k, s in self.held.items()]
        self.held.clear()
        return done

    def load(self, path, version):
        if version < 0:
            raise SyncError("no such version")
        return f"{path}@{version}"

    def report(self):
        return Report("d", 1, [], [])

    def close(self):
        self.closed = True


def test_a_load_that_fails_leaves_the_host_serving(channels):
    mine, theirs = channels
    for order in (Load("a", -1), Load("b", 2), Close()):
        mine.send(order)
    Host(theirs, Echo()).run()
    assert mine.receive(1) == Failed("no such version")
    assert mine.receive(1) == Loaded(2, "b@2")


def test_the_host_answers_orders_and_ends_with_its_connection(channels):
    mine, theirs = channels
    mine.send(SAMPLE)
    mine.send(Ask())
    mine.send(Close())
    Host(theirs, Echo()).run()
    replies = [mine.receive(1) for _ in range(1)]
    assert isinstance(replies[0], Report)
    mine.close()
    Host(theirs, Echo()).run()


# Settings and hand-over ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_survives_its_description(name):
    assert load_spec(dump_spec(get_spec(name))).hash == get_spec(name).hash


def test_settings_survive_a_file_and_faults_are_named(tmp_path):
    told = EngineSettings(model="m", folder="f", deployed=dump_spec(SPEC), planned="r1-all/s8")
    told.write(tmp_path / "s.json")
    found = read_settings(tmp_path / "s.json")
    assert (found, str(found.plan), found.spec.hash) == (told, "r1-all/s8", SPEC.hash)
    # Whole scales go without saying: what an engine's own kernels make of them was never measured.
    assert msgspec.structs.replace(told, planned="r1-all+mid").plan.scale_bits == 8
    (tmp_path / "bad.json").write_text('{"model": 3}')
    for name in ("bad.json", "none.json"):
        with pytest.raises(ConfigError, match=name):
            read_settings(tmp_path / name)
    with pytest.raises(ConfigError, match="no dumped spec"):
        load_spec({"name": "x"})


def test_what_is_taken_from_the_folder_is_gone_from_it(folder):
    with FileStore(folder.frames) as writer:
        handle = writer.put("a.0", b"frame")
        routes = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
        parcel, shape, dtype = put_routes(writer, "a.0.routes", routes)
        assert len(folder.leftovers()) == 2
        store = MemoryStore()
        assert bytes(store.get(folder.offer(handle, store))) == b"frame"
        assert torch.equal(read_routes(folder.take(parcel), shape, dtype), routes)
    assert folder.leftovers() == ()
    with pytest.raises(GuidanceMissing):
        folder.take(handle)
    with pytest.raises(GuidanceCorrupt):
        read_routes(memoryview(b"123"), (2, 2), "uint8")
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


# Recorder -----------------------------------------------------------------------------------------------------------


def test_rows_of_a_request_are_what_its_tokens_recorded():
    recorder = make_recorder()
    seen = forward(recorder, [5, 9, 3, 60], [1, 2, 3, 4])
    found = recorder.collect(torch.tensor([5, 9, 3, 60]), [1, 2, 3, 4, 8], "key")
    record = decode(recorder.store.get(found.guidance))
    assert (found.rows, found.invalid_rows, record.rows) == (4, 0, 4)
    assert torch.equal(found.routes, torch.arange(2).view(1, 2, 1).expand(4, 2, 2).to(found.routes.dtype))
    for (layer, kind), x in seen.items():
        q = quantize_nearest(x.flatten(0, -2), SPEC.for_kind(kind))
        outcome = record.sites[Site(layer, kind)].outcome()
        assert torch.equal(outcome.low, q.codes)
        assert torch.equal(outcome.scales, q.scales)
        if q.global_scale is not None:
            assert torch.equal(outcome.global_scale, q.global_scale)


def test_rows_of_other_tokens_positions_or_weights_are_not_recorded_ones():
    recorder = make_recorder()
    slots = torch.tensor([5, 9, 3, 60])
    forward(recorder, slots.tolist(), [1, 2, 3, 4])
    assert recorder.collect(slots, [1, 2, 7, 4, 8], "token").invalid_rows == 1
    assert recorder.collect(slots[[1, 0, 2, 3]], [2, 1, 3, 4, 8], "position").invalid_rows == 2
    assert recorder.collect(torch.tensor([5, 9, 3, 61]), [1, 2, 3, 4, 8], "never").invalid_rows == 1
    recorder.new_weights(2)
    found = recorder.collect(slots, [1, 2, 3, 4, 8], "old")
    record = decode(recorder.store.get(found.guidance))
    assert (found.invalid_rows, record.weight_version) == (4, 2)
    forward(recorder, slots.tolist(), [1, 2, 3, 4])
    assert recorder.collect(slots, [1, 2, 3, 4, 8], "new").invalid_rows == 0


def test_a_prefix_of_another_request_is_found_by_its_slots():
    recorder = make_recorder()
    forward(recorder, [1, 2, 3, 4], [1, 2, 3, 4])
    first = recorder.collect(torch.tensor([1, 2, 3]), [1, 2, 3, 9], "first")
    # The second request was given slots 1 to 3 by the prefix cache, and wrote only its own.
    recorder.begin(torch.tensor([20]), torch.tensor([3]), torch.tensor([7]))
    recorder.keep(recorder.end())
    second = recorder.collect(torch.tensor([1, 2, 3]), [1, 2, 3, 7], "second")
    one, two = (decode(recorder.store.get(x.guidance)) for x in (first, second))
    assert second.invalid_rows == 0
    for site, part in one.sites.items():
        assert torch.equal(part.planes, two.sites[site].planes)


def test_a_pass_that_does_not_fit_is_refused_and_so_is_a_plan_without_a_store():
    recorder = make_recorder(step_tokens=4)
    with pytest.raises(EngineError, match="step buffer of 4"):
        recorder.begin(torch.arange(5), torch.arange(5), torch.arange(5))
    with pytest.raises(EngineError, match="3 slots were given"):
        recorder.collect(torch.arange(3), [1, 2, 3], "x")
    with pytest.raises(EngineError, match="no store"):
        Recorder(
            recorder.layout,
            SPEC,
            Plan.parse("r1-all/s8"),
            None,
            slots=4,
            step_tokens=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def test_without_guidance_there_are_routes_alone():
    recorder = make_recorder()
    forward(recorder, [1, 2], [1, 2])
    found = recorder.collect(torch.tensor([1]), [1, 2], "x", guidance=False)
    assert found.guidance is None
    assert found.routes.shape == (1, 2, 2)
    assert recorder.store.keys() == ()


def test_tickets_differ():
    grid = torch.stack(torch.meshgrid(torch.arange(40), torch.arange(300), indexing="ij")).flatten(1)
    words = torch.cat([tickets(epoch, grid[0], grid[1]) for epoch in range(4)])
    assert bool((words > 0).all())
    assert len(words.unique()) > 0.9999 * len(words)


# Experts ------------------------------------------------------------------------------------------------------------


def test_emulated_experts_compute_what_the_trainer_computes():
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    layout = describe(model)
    module = model.get_submodule(layout.experts[0])
    recorder = make_recorder(spec=SPEC)
    ours = EmulatedExperts(0, SPEC.weights, recorder.quantize, lambda x: module._apply_gate(x))
    x, chosen = torch.randn(5, layout.hidden), torch.tensor([[0, 3], [1, 2], [7, 0], [5, 4], [3, 3]])
    gates = torch.rand(5, 2)
    with pytest.raises(EngineError, match="before their weights"):
        ours(x, chosen, gates)
    ours.load(module.gate_up_proj, module.down_proj)
    sites = TrainerSites(layout, SPEC)
    with bound(model, sites), torch.no_grad():
        expected = module(x, chosen, gates)
    assert torch.allclose(ours(x, chosen, gates), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.packed["down_proj"].codes, pack_weight(module.down_proj, SPEC.weights).codes)


def same_parts(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.parts(), right.parts(), strict=True))


def loaded_experts(model):
    """Emulated experts of layer 0 with weights of their own, as an engine's loader fills them."""
    layout = describe(model)
    module = model.get_submodule(layout.experts[0])
    ours = EmulatedExperts(0, SPEC.weights, make_recorder().quantize, lambda x: module._apply_gate(x))
    held = module.gate_up_proj.detach().clone(), module.down_proj.detach().clone()
    ours.load(*held)
    return ours, held


def test_experts_serve_what_comes_packed_and_nothing_of_what_lay_there():
    model, other = (tiny_model("qwen3_moe", seed=seed, dtype=torch.float32) for seed in (0, 1))
    names = Names(hollow(model))
    ours, held = loaded_experts(model)
    theirs, _ = loaded_experts(other)
    # Codes that no rounding of the plain weights gives.
    state = dict(PackedState(other, names.layout, SPEC.weights, dict(other.named_parameters())))
    sent = state[f"{names.layout.experts[0]}.gate_up_proj"]
    sent.codes[2, 3, 1] ^= 0x10
    experts = dict.fromkeys(names.layout.experts, ours)
    assert place_packed(names, {n: w for n, w in state.items() if ".0.mlp" in n}, experts, "an engine") == 2
    assert not torch.equal(ours.packed["gate_up_proj"].codes, sent.codes)
    ours.load(*held)
    assert torch.equal(ours.packed["gate_up_proj"].codes, sent.codes)
    assert same_parts(ours.packed["down_proj"], theirs.packed["down_proj"])
    assert torch.equal(ours.gate_up(ours).values, widened(sent.operand()).values)
    # The file that they came in is given back.
    assert ours.packed["gate_up_proj"].codes.data_ptr() != sent.codes.data_ptr()
    assert all(bool(weight.isnan().all()) for weight in held)
    # Plain weights after packed ones: the engine's loader has written them.
    for weight, name in zip(held, ("gate_up_proj", "down_proj"), strict=True):
        weight.copy_(getattr(model.get_submodule(names.layout.experts[0]), name))
    ours.load(*held)
    again, _ = loaded_experts(model)
    for name in ("gate_up_proj", "down_proj"):
        assert same_parts(ours.packed[name], again.packed[name])
    with pytest.raises(SyncError, match="vLLM's own kernels keep the experts of layer 0"):
        place_packed(names, state, {0: None}, "vLLM")


# Weights ------------------------------------------------------------------------------------------------------------


def served_like_an_engine(model, names, quantized=True):
    """Parameters as a serving engine keeps them: fused, and with a padded vocabulary."""
    held, packed, stacked = {}, {}, {}
    state = names.checkpoint(dict(model.named_parameters()))
    for name, tensor in state.items():
        if ".experts." in name:
            continue
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            pad = (0, 0, 0, 32) if "embed" in name or "lm_head" in name else None
            held[name] = torch.nn.functional.pad(tensor, pad) if pad else tensor
    for name, key in names.experts.items():
        weight = model.get_parameter(name)
        stacked[key] = weight
        if quantized:
            packed[key] = pack_weight(weight, SPEC.weights)
    return held, packed, stacked


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("quantized", [True, False])
def test_the_checksum_over_an_engines_parameters_is_the_trainers(family, quantized):
    model = tiny_model(family)
    names = Names(hollow(model))
    served = Served(names, *served_like_an_engine(model, names, quantized))
    assert served.digest() == model_digest(model, names.layout, SPEC.weights if quantized else None)


@pytest.mark.parametrize("where", ["qkv_proj", "embed_tokens", "norm", "experts"])
def test_one_changed_bit_anywhere_changes_the_checksum(where):
    model = tiny_model("qwen3_moe")
    names = Names(hollow(model))
    held, packed, stacked = served_like_an_engine(model, names)
    if where == "experts":
        packed[1, "down_proj"].codes[3, 1, 4] ^= 1
    else:
        tensor = next(held[name] for name in sorted(held) if where in name)
        tensor = held[next(name for name in sorted(held) if where in name)] = tensor.clone()
        tensor.view(-1)[5] += 1
    found = Served(names, held, packed, stacked).digest()
    assert found != model_digest(model, names.layout, SPEC.weights)


def test_tied_parameters_have_two_names_and_must_agree():
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    names = Names(hollow(model))
    assert names.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    state = names.checkpoint(dict(model.named_parameters()))
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    held, packed, stacked = served_like_an_engine(model, names)
    assert Served(names, held, packed, stacked).digest() == model_digest(model, names.layout, SPEC.weights)
    held["lm_head.weight"] = held["lm_head.weight"] + 1
    with pytest.raises(SyncError, match="tied"):
        Served(names, held, packed, stacked).digest()


def test_a_tensor_that_is_not_served_is_named():
    model = tiny_model("qwen3_moe")
    names = Names(hollow(model))
    held, packed, stacked = served_like_an_engine(model, names)
    with pytest.raises(SyncError, match=r"o_proj.weight' is not among"):
        Served(names, {k: v for k, v in held.items() if "0.self_attn.o_proj" not in k}, packed, stacked).digest()
    with pytest.raises(SyncError, match="stacked experts"):
        Served(names, held, {}, {}).digest()
    short = {k: v[:-64] if "0.self_attn.qkv" in k else v for k, v in held.items()}
    with pytest.raises(SyncError, match="the engine serves"):
        Served(names, short, packed, stacked).digest()


def test_a_state_that_is_not_the_models_is_refused():
    model = tiny_model("qwen3_moe")
    names, state = Names(hollow(model)), dict(model.named_parameters())
    names.check(state, SPEC.weights)
    first = next(iter(state))
    with pytest.raises(SyncError, match="missing"):
        names.check({k: v for k, v in state.items() if k != first}, SPEC.weights)
    with pytest.raises(SyncError, match="no parameter 'extra'"):
        names.check(state | {"extra": torch.zeros(1)}, SPEC.weights)
    with pytest.raises(SyncError, match="has shape"):
        names.check(state | {first: torch.zeros(1)}, SPEC.weights)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_are_taken_if_they_are_the_engines(family):
    model = tiny_model(family)
    names, state = Names(hollow(model)), dict(model.named_parameters())
    whole = dict(PackedState(model, names.layout, SPEC.weights, state))
    names.check(whole, SPEC.weights)
    expert, other = next(iter(names.experts)), next(name for name in state if name not in names.experts)
    for numerics in (None, get_spec("mxfp4-w4a4-kv4").weights):
        with pytest.raises(SyncError, match="comes packed as nvfp4-te/weight, the engine deploys"):
            names.check(whole, numerics)
    # A parameter that is not an expert's is computed as it is, so it cannot come packed.
    with pytest.raises(SyncError, match=f"'{other}' comes packed"):
        names.check(state | {other: whole[expert]}, SPEC.weights)
    small = pack_weight(torch.zeros(1, 16, 16).bfloat16(), SPEC.weights)
    with pytest.raises(SyncError, match="comes packed with shape"):
        names.check(state | {expert: small}, SPEC.weights)
    whole[expert].scales = whole[expert].scales[:1]
    with pytest.raises(FormatError, match=f"'{expert}.scales' is uint8"):
        names.check(whole, SPEC.weights)


def test_the_checkpoint_leaves_out_what_comes_packed():
    model = tiny_model("qwen3_moe")
    names, state = Names(hollow(model)), dict(model.named_parameters())
    whole = names.checkpoint(state)
    rest = names.checkpoint(PackedState(model, names.layout, SPEC.weights, state))
    assert rest.keys() == {name for name in whole if ".experts." not in name}
    assert all(torch.equal(rest[name], whole[name]) for name in rest)


# Self-check ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["r1-all+mid/s8", "r4-all/s8", None])
def test_a_probe_of_the_same_model_passes_and_one_of_another_does_not(plan):
    model, store = tiny_model("qwen3_moe"), MemoryStore()
    engine = EmbeddedEngine(tiny_model("qwen3_moe"), None, SPEC, Plan.parse(plan) if plan else None, store)
    sampling = SamplingParams(max_new_tokens=4, seed=0)
    rollouts = engine.generate([Request("probe", probe_prompt(288), 1, sampling)])
    records = [decode(store.get(r.guidance)) for r in rollouts] if plan else None
    empty, state = hollow(model), dict(model.named_parameters())
    check = self_check(empty, state, SPEC, rollouts, records)
    assert check.gap < 1.5
    assert all(rate < 0.1 for rate in check.flips.values())
    assert next(empty.parameters()).is_meta
    layout = describe(empty)
    assert self_check(empty, PackedState(model, layout, SPEC.weights, state), SPEC, rollouts, records) == check
    if plan:
        other = dict(tiny_model("qwen3_moe", seed=5).named_parameters())
        with pytest.raises(SyncError, match="codes do not match"):
            self_check(empty, other, SPEC, rollouts, records)
        with pytest.raises(SyncError, match="do not match"):
            self_check(empty, PackedState(model, layout, SPEC.weights, other), SPEC, rollouts, records)
        # Heads of K in another order: the checksum of what was sent would not show it.
        swapped = dict(state)
        for name in [n for n in state if "k_proj" in n]:
            swapped[name] = state[name].roll(32, 0)
        with pytest.raises(SyncError, match="of k in layer 0"):
            self_check(empty, swapped, SPEC, rollouts, records)


# Tables -------------------------------------------------------------------------------------------------------------


def test_the_coverage_of_an_engine_compares_with_the_trainers():
    model = tiny_model("qwen3_moe")
    names, recorder = Names(hollow(model)), make_recorder()
    forward(recorder, [1, 2], [1, 2])
    packed = [(layer, name) for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
    mine = engine_coverage(names, SPEC, reported_formats(recorder, packed, [0, 1]))
    with bound(model, TrainerSites(names.layout, SPEC)):
        theirs = coverage(model, SPEC)
    compare(mine, theirs)
    assert mine.parameters == theirs.parameters
    assert {row.calls for row in mine.rows if row.kind in tuple(Kind)} == {1}
    lacking = engine_coverage(names, SPEC, reported_formats(recorder, packed[:-1], [0, 1]))
    with pytest.raises(Exception, match=r"1.mlp.experts \(down\)"):
        compare(lacking, theirs)


def test_a_site_that_is_fused_away_is_named_and_refused():
    lines = [
        SiteLine("experts_in", "kernel", True, True, "recorded"),
        SiteLine("experts_mid", "kernel", False, False, "fused away", "SwiGLU"),
        SiteLine("k", "kernel", False, False, "not quantized"),
    ]
    text = render_sites(lines)
    assert "experts_mid" in text
    assert "fused away" in text
    check_plan(Plan.parse("r1-all/s8"), lines)
    check_plan(None, lines)
    with pytest.raises(EngineError, match="plan 'r1-all/s8' leaves it out"):
        check_plan(Plan.parse("r1-all+mid/s8"), lines)


def test_an_operand_is_widened_on_a_cpu_alone():
    q = quantize_nearest(torch.randn(2, 32).bfloat16(), SPEC.activations)
    from tracefp4.models.sites import Operand

    assert widened(Operand(q.operand(), None)).values.dtype is torch.float32


def test_a_frame_stays_in_the_folder_until_it_is_claimed(folder):
    with FileStore(folder.frames) as writer:
        handles = [writer.put(f"a.{i}", b"frame") for i in range(3)]
        store = LateStore(MemoryStore())
        mine = [folder.offer(handle, store) for handle in handles]
        assert len(folder.leftovers()) == 3
        assert bytes(store.get(mine[0])) == b"frame"
        store.delete(mine[1])
        assert len(folder.leftovers()) == 1
        store.clear()
    assert folder.leftovers() == ()
    assert store.counts().saved_share == pytest.approx(2 / 3)
    with pytest.raises(GuidanceMissing):
        folder.drop(handles[1])


def test_a_handle_of_another_folder_is_missing(folder):
    with pytest.raises(GuidanceMissing):
        folder.take(Handle("elsewhere", "a", 3))
