"""Parts of the vLLM plugin that need no running engine."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import types

import numpy as np
import pytest
import torch

from tracefp4.core import Kind, Site
from tracefp4.errors import ConfigError, EngineError, GuidanceCorrupt
from tracefp4.formats import e2m1, e4m3
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.integrations.engines.recorder import Recorder
from tracefp4.integrations.engines.settings import VARIABLE, EngineSettings, dump_spec
from tracefp4.integrations.engines.sites import check_plan
from tracefp4.integrations.vllm import capturer, native
from tracefp4.integrations.vllm.arguments import block_size, check_layout, check_options, read_arguments
from tracefp4.integrations.vllm.attach import choose_carried
from tracefp4.integrations.vllm.binding import bind, find
from tracefp4.integrations.vllm.capturer import TraceCapturer, install_capturer, pack_rows, row_bytes, unpack_rows
from tracefp4.integrations.vllm.native import EXPERTS, HOOKS, LOADED, PATHS, native_lines, running_path, site_table
from tracefp4.integrations.vllm.observe import Watch, requantize
from tracefp4.integrations.vllm.own_pages import read_own_pages
from tracefp4.integrations.vllm.reader import FrameReader
from tracefp4.integrations.vllm.rewind import RewindingGenerator, mark_generators
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.quantizers.nearest import quantize_nearest
from tracefp4.rollout.admission import recorded_shapes
from tracefp4.rollout.capture import Capture

SPEC = get_spec("nvfp4-w4a4-kv4")
MOE = "vllm.model_executor.layers.fused_moe"
LAYOUT = describe(tiny_model("qwen3_moe"))
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm._version") is None,
    reason="vLLM is not installed here",
)


def recorder(plan="r4-all:experts+mid"):
    device = torch.device("cpu")
    sizes = {"slots": 32, "step_tokens": 8, "dtype": torch.bfloat16, "device": device}
    return Recorder(LAYOUT, SPEC, Plan.parse(plan), MemoryStore(), **sizes)


def capture(slots, plan="r1-all+mid/s8"):
    return Capture(LAYOUT, recorded_shapes(LAYOUT, SPEC, Plan.parse(plan)), 1, slots, torch.device("cpu"))


# -- What vLLM may be asked for


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("speculative_config", {"method": "ngram"}, "speculative decoding"),
        ("pipeline_parallel_size", 2, "pipeline parallelism"),
        ("tensor_parallel_size", 2, "tensor parallelism"),
        ("async_scheduling", True, "a step ahead"),
        ("enable_lora", True, "LoRA"),
        ("kv_cache_dtype", "fp8", "the spec says"),
        ("enforce_eager", False, "hooks"),
    ],
)
def test_options_that_guidance_cannot_follow_are_refused_by_name(option, value, words):
    with pytest.raises(EngineError, match=words) as error:
        check_options({option: value})
    assert f"rollout.options.{option}" in str(error.value)


def test_other_options_pass():
    check_options({"tensor_parallel_size": 1, "enforce_eager": True, "max_logprobs": 5, "enable_lora": False})


def test_pages_grow_to_blocks_that_the_attention_reads():
    assert [block_size(n, "cpu") for n in (1, 16, 32, 33)] == [32, 32, 32, 64]
    assert [block_size(n, "cuda") for n in (1, 16, 20)] == [16, 16, 32]


def test_arguments_of_the_host_are_checked():
    with pytest.raises(ConfigError, match="blocks"):
        read_arguments({"dtype": "bfloat16", "device": "cpu", "block_size": 32})


@pytest.mark.parametrize(("family", "words"), [("deepseek_v3", "latent"), ("qwen3_next", "linear attention")])
def test_models_without_one_slot_a_token_are_refused(family, words):
    with pytest.raises(EngineError, match=words):
        check_layout(describe(tiny_model(family)))


# -- The capability table


def test_the_table_names_what_is_recorded_and_what_is_fused_away():
    here = {line.site: line.state for line in site_table(SPEC, Plan.parse("r1-all/s8"), "cpu")}
    assert here == {"experts_in": "recorded", "experts_mid": "not planned", "k": "recorded", "v": "recorded"}
    plain = {line.state for line in site_table(get_spec("bf16"), None, "cpu")}
    assert plain == {"not quantized"}
    mixed = site_table(get_spec("mxfp4-w4a8-kv4"), Plan.parse("r1-all+mid/s8"), "cpu", "rows by KV slot")
    assert {line.state for line in mixed} == {"recorded"}
    assert "mxfp8" in mixed[0].note
    assert "rows by KV slot" in mixed[0].note
    assert {line.state for line in site_table(SPEC, Plan.parse("r1-all+mid/s8"), "cuda")} == {"expected, not run"}
    native = native_lines()
    assert {line.state for line in native} <= {"expected, not run", "fused away", "not quantized", "not bound"}
    trtllm = {line.site: line.state for line in native if line.path == "flashinfer_trtllm"}
    assert trtllm == {"experts_in": "expected, not run", "experts_mid": "fused away"}


@pytest.mark.parametrize(
    ("backend", "per_token", "path"),
    [
        ("VLLM_CUTLASS", False, "cutlass"),
        ("FLASHINFER_TRTLLM", True, "flashinfer_trtllm, nvfp4_per_token"),
        ("EMULATION", False, "emulation"),
        ("HUMMING", False, ""),
    ],
)
def test_a_layer_tells_its_path_and_only_that_is_shown(monkeypatch, backend, per_token, path):
    method = types.SimpleNamespace(nvfp4_backend=types.SimpleNamespace(name=backend), per_token_activation=per_token)
    assert running_path(method) == path
    monkeypatch.setattr(native, "available", lambda: [hook.target for hook in HOOKS])
    lines = native.observed(path)
    assert {line.path for line in lines} == {path, "--kv-cache-dtype nvfp4"}
    monkeypatch.setattr(native, "available", list)
    experts = {line.state for line in native.observed(path) if line.path != "--kv-cache-dtype nvfp4"}
    assert experts <= {"not bound", "fused away"}
    with pytest.raises(EngineError, match="does not show here"):
        check_plan(Plan.parse("r1-all:experts"), native.observed(path))


def test_a_path_that_does_not_quantize_serves_no_plan():
    with pytest.raises(EngineError, match="which marlin does not quantize"):
        check_plan(Plan.parse("r1-all:experts"), native.observed("marlin"), observed=True)


# -- Rows in vLLM's side channel


def filled(count, seed=0):
    found = capture(count)
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(torch.randint(0, 100, p.shape, generator=generator).to(p.dtype) for p in found.take(count))
    found.put(torch.arange(count), parts)
    return found


def test_rows_survive_the_side_channel():
    step = filled(6)
    rows = pack_rows(step, 5)
    assert rows.dtype is torch.uint8
    assert rows.shape == (5, row_bytes(step))
    other = capture(9)
    unpack_rows(rows, other)
    assert all(torch.equal(a, b) for a, b in zip(step.take(5), other.take(5), strict=True))
    # Blocks are stored and joined row by row: any two parts are the whole.
    again = capture(9)
    unpack_rows(torch.cat([rows[:2], rows[2:]]), again)
    assert all(torch.equal(a, b) for a, b in zip(step.take(5), again.take(5), strict=True))


def test_rows_of_another_plan_are_refused():
    with pytest.raises(GuidanceCorrupt, match="bytes each"):
        unpack_rows(pack_rows(filled(4), 4)[:, :-1], capture(4))


def told(**changes):
    made = {"model": "", "folder": "", "deployed": {}, "planned": "none"}
    return EngineSettings(**{**made, **changes})


def test_the_capturer_takes_the_place_of_vllms_own_for_our_models_alone(monkeypatch):
    found = recorder("r1-all:experts+mid")
    calls = []

    def make(settings, config, carried, *, slots, block_size, device):
        calls.append((settings, carried, slots, block_size, device.type))
        return types.SimpleNamespace(recorder=found)

    monkeypatch.setattr(capturer, "make_session", make)
    theirs = type("RoutedExpertsCapturer", (), {"__init__": lambda self, max_num_batched_tokens, vllm_config: None})
    worker = types.SimpleNamespace(RoutedExpertsCapturer=theirs)
    install_capturer(worker)
    install_capturer(worker)
    config = types.SimpleNamespace(
        device_config=types.SimpleNamespace(device="cpu"), cache_config=types.SimpleNamespace(block_size=16)
    )
    monkeypatch.setattr(capturer, "told_settings", lambda config: None)
    assert isinstance(worker.RoutedExpertsCapturer(max_num_batched_tokens=8, vllm_config=config), theirs)
    monkeypatch.setattr(capturer, "told_settings", lambda config: told())
    made = worker.RoutedExpertsCapturer(max_num_batched_tokens=8, vllm_config=config)
    assert calls == [(told(), "rows", 0, 16, "cpu")]
    ids = torch.tensor([[3, 1], [0, 7], [5, 2]], dtype=torch.int32)
    for layer in LAYOUT.moe_layers:
        made.capture(layer, (ids + layer) % 8)
    rows = made.snapshot_routing_data(3)
    assert rows.shape == (3, *made.shape_per_token)
    assert made.output_dtype is rows.dtype
    made.capture(0, torch.zeros_like(ids))  # A snapshot does not change with the next step.
    back = capture(3, "r1-all:experts+mid")
    unpack_rows(rows, back)
    assert torch.equal(back.routes[:, 1].int(), (ids + 1) % 8)
    assert torch.equal(back.routes[:, 0].int(), ids)


@pytest.mark.parametrize(
    ("device", "second", "carried"), [("cpu", True, "connector"), ("cuda", False, "connector"), ("cuda", True, "rows")]
)
def test_the_side_channel_is_taken_where_the_second_model_runner_runs(device, second, carried):
    assert choose_carried(types.SimpleNamespace(use_v2_model_runner=second), device) == carried


TOKENS = [4, 8, 15, 16, 23, 42, 7]
"""Six rows: the last one is never forwarded."""


def forward(found, first, last, slots=None):
    """A pass over tokens ``first..last - 1`` in which every site of every layer is rounded."""
    count = last - first
    generator = torch.Generator().manual_seed(first)
    slots = torch.arange(count) if slots is None else slots
    found.begin(slots, torch.arange(first, last), torch.tensor(TOKENS[first:last]))
    for layer in LAYOUT.moe_layers:
        x = torch.randn(count, LAYOUT.hidden, generator=generator).bfloat16()
        h = torch.randn(count * LAYOUT.top_k, LAYOUT.intermediate, generator=generator).bfloat16()
        found.route(layer, torch.randint(0, LAYOUT.num_experts, (count, LAYOUT.top_k), generator=generator))
        found.quantize(Site(layer, Kind.EXPERTS_IN), x)
        found.quantize(Site(layer, Kind.EXPERTS_MID), h, torch.arange(count * LAYOUT.top_k))


def by_slot(store, steps, version=0):
    """The frame that the connector's way gives."""
    found = Recorder(LAYOUT, SPEC, PLAN, store, slots=32, step_tokens=8, dtype=torch.bfloat16, device=CPU)
    if version:
        found.new_weights(version)
    for first, last in steps:
        forward(found, first, last, torch.arange(first, last) + 3)
        found.keep(found.end())
    return found.collect(torch.arange(6) + 3, TOKENS, f"slot-{len(steps)}")


CPU = torch.device("cpu")
PLAN = Plan.parse("r1-all:experts+mid")


def test_a_reader_makes_the_frame_that_the_slots_would_have_given():
    store = MemoryStore()
    found = Recorder(LAYOUT, SPEC, PLAN, None or store, slots=0, step_tokens=8, dtype=torch.bfloat16, device=CPU)
    reader = FrameReader(LAYOUT, SPEC, PLAN, store)
    parts = []
    found.new_weights(3)
    reader.new_weights(3)
    for first, last in ((0, 4), (4, 6)):
        forward(found, first, last)
        parts.append(TraceCapturer(found).snapshot_routing_data(last - first))
    rows = torch.cat(parts).numpy()
    read, slots = reader.read(rows, TOKENS, "rows"), by_slot(store, ((0, 4), (4, 6)), version=3)
    assert read.invalid_rows == slots.invalid_rows == 0
    assert bytes(store.get(read.guidance)) == bytes(store.get(slots.guidance))
    assert torch.equal(read.routes, slots.routes)
    assert decode(store.get(read.guidance)).weight_version == 3
    assert reader.read(rows, TOKENS, "none", guidance=False).guidance is None
    # Rows of other tokens, or of other weights, are never taken for these.
    other = [*TOKENS[:2], 99, *TOKENS[3:]]
    assert reader.read(rows, other, "other").invalid_rows == 1
    reader.new_weights(4)
    assert reader.read(rows, TOKENS, "stale").invalid_rows == 6
    with pytest.raises(GuidanceCorrupt, match="vLLM returned 5"):
        reader.read(rows[1:], TOKENS, "short")


class Group:
    is_first_rank = True


@needs_vllm
@pytest.mark.engine
def test_rows_pass_through_vllms_own_store_and_a_prefix_hit_finds_them(monkeypatch):
    """vLLM's output worker, scheduler side, tails and block store, with a stand-in for the model runner alone."""
    from vllm.distributed.aux_output_connector import worker as module
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, PackedBlockHashes

    store = MemoryStore()
    found = Recorder(LAYOUT, SPEC, PLAN, store, slots=0, step_tokens=8, dtype=torch.bfloat16, device=CPU)
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=4),
        aux_output_config=types.SimpleNamespace(max_bytes=None),
        max_concurrent_batches=2,
    )
    monkeypatch.setattr(
        module, "RoutedExpertsCapturer", lambda max_num_batched_tokens, vllm_config: TraceCapturer(found)
    )
    monkeypatch.setattr(module, "bind_routed_experts_capturer", lambda model, capturer: None)
    monkeypatch.setattr(module, "get_tp_group", Group)
    monkeypatch.setattr(module, "resolve_kv_cache_block_sizes", lambda cache, config: (2, 2))
    cache = types.SimpleNamespace(num_blocks=16)
    connector = module.get_aux_output_connector(torch.nn.Module(), config, cache)

    def step(name, first, last, emit, hashes):
        new, packed = len(hashes), PackedBlockHashes(b"".join(bytes([n]) * 4 for n in hashes), 4)
        connector.begin_step(AuxOutputConnectorMetadata(0, {name: emit}, {name: packed} if new else {}, ()))
        forward(found, first, last)
        batch = types.SimpleNamespace(
            req_ids=[name],
            query_start_loc_np=np.array([0, last - first]),
            num_computed_tokens_np=np.array([first]),
        )
        pending = connector.prepare_output(batch)
        pending.enqueue_cpu_copy(np.array([int(last >= 5)]), np.array([0]))
        output = pending.process_output().get(name)
        return [] if output is None else [output.rows]

    whole = step("a", 0, 4, 0, [0, 1]) + step("a", 4, 5, 0, []) + step("a", 5, 6, 5, [2])
    rows = np.concatenate(whole)
    again = np.concatenate(step("b", 4, 6, 0, [0, 1, 3]))  # Its first four tokens lie in the prefix cache.
    connector.close()
    reader = FrameReader(LAYOUT, SPEC, PLAN, store)
    one, two = reader.read(rows, TOKENS, "a"), reader.read(again, TOKENS, "b")
    expected = by_slot(store, ((0, 4), (4, 5), (5, 6)))
    assert bytes(store.get(one.guidance)) == bytes(store.get(expected.guidance))
    assert one.invalid_rows == two.invalid_rows == 0
    assert np.array_equal(rows[:4], again[:4])
    assert bytes(store.get(two.guidance)) == bytes(store.get(by_slot(store, ((0, 4), (4, 6))).guidance))


def own_attention(name):
    """A layer of vLLM's with NVFP4 pages of its own, as far as it is looked at."""
    attention = importlib.import_module("vllm.model_executor.layers.attention").Attention
    layer = attention.__new__(attention)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.kv_cache_dtype, layer._k_scale_float, layer._v_scale_float = name, "nvfp4", 1.0, 1.0
    layer.impl = types.SimpleNamespace(
        num_kv_heads=LAYOUT.kv_heads, head_size=LAYOUT.head_dim, nvfp4_fa2=True, is_kvcache_nvfp4=True
    )
    layer.kv_cache = torch.zeros(4, 2 * LAYOUT.kv_heads, 16, LAYOUT.head_dim // 2 + 2, dtype=torch.uint8)
    return layer


@needs_vllm
@pytest.mark.engine
def test_a_watched_model_is_recorded_from_the_capturer_to_the_frame(tmp_path, monkeypatch):
    """Plugin, output worker, worker extension, backend and reader, with a stand-in for vLLM's model and its runner."""
    from tracefp4.integrations.vllm import backend as hosted
    from tracefp4.integrations.vllm import session as sessions
    from tracefp4.integrations.vllm.worker import TraceWorker

    folder = tmp_path / "model"
    tiny_model("qwen3_moe").save_pretrained(folder)
    spec, plan = get_spec("nvfp4-w4a4-kv4", "nvfp4-flashinfer-fast"), Plan.parse("r1-all+mid/s8")
    settings = EngineSettings(
        model=str(folder), folder=str(tmp_path / "frames"), deployed=dump_spec(spec), planned=str(plan), emulate=False
    )
    (tmp_path / "frames").mkdir()
    settings.write(tmp_path / "settings.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "settings.json"))
    attention = {f"model.layers.{layer}.attn": own_attention(f"model.layers.{layer}.attn") for layer in (0, 1)}
    config = types.SimpleNamespace(
        quant_config=None,
        compilation_config=types.SimpleNamespace(static_forward_context=attention),
        device_config=types.SimpleNamespace(device="cpu"),
        cache_config=types.SimpleNamespace(block_size=16),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
    )
    module = types.SimpleNamespace(RoutedExpertsCapturer=object)
    install_capturer(module)
    made = module.RoutedExpertsCapturer(max_num_batched_tokens=8, vllm_config=config)
    experts = importlib.import_module(f"{MOE}.routed_experts").RoutedExperts
    watch = Watch(lambda: sessions.installed().recorder)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            backend = types.SimpleNamespace(name="EMULATION")
            for layer in LAYOUT.moe_layers:
                part = experts.__new__(experts)
                torch.nn.Module.__init__(part)
                part.layer_name = f"model.layers.{layer}.mlp.experts"
                part.quant_method = types.SimpleNamespace(nvfp4_backend=backend)
                self.add_module(f"experts{layer}", part)

        def forward(self, input_ids, positions):
            for layer in LAYOUT.moe_layers:
                made.capture(layer, EXPERTS_CHOSEN[:1].expand(len(input_ids), -1))
                with watch.looker.inside(layer):
                    for width, rows in ((LAYOUT.hidden, 1), (LAYOUT.intermediate, LAYOUT.top_k)):
                        x = torch.randn(len(input_ids) * rows, width).bfloat16()
                        watch.quantize_input(
                            moe_kernel_quantize_input, x, torch.ones(1), "nvfp4", False, quantization_emulation=True
                        )
            for layer in attention.values():  # As vLLM's store kernel: bytes of K and V into the slots of the batch.
                slots = context.slot_mapping["layer"]
                layer.kv_cache[slots.clamp(min=0) // 16, :, slots % 16] = torch.randint(
                    0, 127, (len(slots), 2 * LAYOUT.kv_heads, 18), dtype=torch.uint8
                )

    model = Model()
    runner = types.SimpleNamespace(
        get_model=lambda: model,
        kv_cache_config=types.SimpleNamespace(num_blocks=4),
        compilation_config=types.SimpleNamespace(static_forward_context={}),
    )
    worker = TraceWorker()
    worker.model_runner, worker.vllm_config, worker.device = runner, config, "cpu"
    monkeypatch.setattr("tracefp4.integrations.vllm.worker.mark_generators", lambda runner: None)
    context = types.SimpleNamespace(slot_mapping={})
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    facts = worker.tracefp4_attach()
    try:
        assert facts["carried"] == "rows"
        sites = {line.site: (line.path, line.state) for line in sessions.session().sites}
        assert sites["experts_mid"] == ("emulation", "expected, not run")
        assert sites["k"] == ("--kv-cache-dtype nvfp4", "expected, not run")
        rows = []
        for first, last in ((0, 4), (4, 6)):
            # vLLM pads a batch; what lies behind the real tokens is not taken.
            tokens = torch.tensor([*TOKENS[first:last], 0, 0])
            slots = torch.tensor([*range(18 + first, 18 + last), -1, -1])
            context.slot_mapping = {"layer": slots}
            model(input_ids=tokens, positions=torch.arange(first, first + len(tokens)))
            rows.append(made.snapshot_routing_data(last - first).numpy())
        codes, scales = read_own_pages(attention["model.layers.1.attn"], Kind.V, torch.arange(18, 24))
        for layer in attention.values():
            layer.kv_cache.zero_()  # Its blocks are another request's by the time the output is read.
        backend = hosted.VLLMBackend.__new__(hosted.VLLMBackend)
        store = sessions.session().store
        backend._reader = FrameReader(LAYOUT, spec, plan, store)
        sample = types.SimpleNamespace(key="mine", tokens=TOKENS[:4], guidance=True)
        output = types.SimpleNamespace(
            outputs=[types.SimpleNamespace(routed_experts=np.concatenate(rows))],
            metrics=types.SimpleNamespace(num_preemptions=2),
        )
        running = hosted._Running(sample, "internal", tokens=TOKENS[4:])
        found, preemptions = backend._collected(running, output)
        assert (found.invalid_rows, found.rows, preemptions) == (0, 6, 2)
        record = decode(store.get(found.guidance))
        assert len(record.sites) == 4 * len(LAYOUT.moe_layers)
        outcome = record.sites[Site(1, Kind.V)].outcome()
        assert torch.equal(outcome.low.view(6, 2, 32), e2m1.unpack(codes) & 1)
        assert torch.equal(outcome.scales.view(scales.shape), scales)
        assert found.routes[:, 0].tolist() == [[5, 0]] * 6
        output.outputs[0].routed_experts = None
        assert backend._collected(running, output) is None
    finally:
        worker.tracefp4_detach()
    assert sessions.installed() is None


@needs_vllm
@pytest.mark.engine
def test_the_tested_release_asks_of_a_capturer_what_ours_answers():
    from vllm.distributed.aux_output_connector import worker as module
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as theirs

    real = theirs.RoutedExpertsCapturer
    assert list(inspect.signature(real).parameters) == ["max_num_batched_tokens", "vllm_config"]
    for name in ("capture", "snapshot_routing_data"):
        ours = getattr(TraceCapturer, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(getattr(real, name)).parameters)
    asked = set(re.findall(r"_capturer\.(\w+)", inspect.getsource(module)))
    made = TraceCapturer(recorder("r1-all:experts+mid"))
    assert asked
    assert all(hasattr(made, name) for name in asked)
    register = importlib.import_module("tracefp4.integrations.vllm.plugin").register
    register()
    register()
    assert module.RoutedExpertsCapturer is not real
    assert module.AuxOutputWorkerConnector.__init__.__globals__["RoutedExpertsCapturer"] is module.RoutedExpertsCapturer


# -- vLLM's own quantizers, watched: stand-ins with its signatures


def moe_kernel_quantize_input(
    A,
    A_scale,
    quant_dtype,
    per_act_token_quant,
    block_shape=None,
    is_scale_swizzled=True,
    quantization_emulation=False,
    mx_alignment=0,
):
    if quantization_emulation:
        return A, None
    q = quantize_nearest(A, FAST, A_scale.reshape(-1)[:1].expand(len(A), 1))
    return e2m1.pack(q.codes), tile(q.scales) if is_scale_swizzled else q.scales.view(torch.float8_e4m3fn)


def quantize_nvfp4_per_token_input(hidden_states):
    q = quantize_nearest(hidden_states, FAST)
    return e2m1.pack(q.codes), q.scales, torch.reciprocal(q.global_scale.flatten())


def get_cutlass_moe_mm_data(
    topk_ids,
    expert_offsets,
    problem_sizes1,
    problem_sizes2,
    input_permutation,
    output_permutation,
    num_experts,
    n,
    k,
    blockscale_offsets=None,
    is_gated=True,
):
    flat = topk_ids.flatten()
    order = torch.argsort(flat, stable=True)
    input_permutation.copy_(order // topk_ids.shape[1])
    output_permutation[order] = torch.arange(len(flat), dtype=torch.int32)
    counts = torch.bincount(flat, minlength=num_experts)
    expert_offsets[1:] = counts.cumsum(0)
    blockscale_offsets[1:] = ((counts + 127) // 128 * 128).cumsum(0)


def scaled_fp4_experts_quant(input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk):
    expert = torch.searchsorted(expert_offsets[1:].contiguous(), torch.arange(len(input_tensor)), right=True)
    q = quantize_nearest(input_tensor, FAST, input_global_scale[expert].unsqueeze(1))
    scales = torch.zeros(int(blockscale_offsets[-1]), q.scales.shape[1], dtype=torch.uint8)
    scales[blockscale_offsets[expert] + torch.arange(len(expert)) - expert_offsets[expert]] = q.scales
    return e2m1.pack(q.codes), tile(scales)


def silu_and_mul_scaled_fp4_experts_quant(input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk):
    gate, up = input_tensor.chunk(2, dim=1)
    return scaled_fp4_experts_quant(gate * up, input_global_scale, expert_offsets, blockscale_offsets, topk)


def tile(scales):
    """Scales ``(rows, blocks)`` in tiles of 128 rows and 4 blocks."""
    rows, blocks = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    whole = torch.zeros(rows * 128, blocks * 4, dtype=torch.uint8)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole.view(rows, 4, 32, blocks, 4).permute(0, 3, 2, 1, 4).contiguous()


FAST = get_spec("nvfp4-w4a4", "nvfp4-flashinfer-fast").activations
EXPERTS_CHOSEN = torch.tensor([[5, 0], [0, 2], [2, 5]])


def watched(calls):
    """Record what ``calls(watch, x, h)`` rounds in every layer; the record, and the two inputs."""
    store, spec = MemoryStore(), get_spec("nvfp4-w4a4", "nvfp4-flashinfer-fast")
    found = Recorder(LAYOUT, spec, Plan.parse("r4-all:experts+mid"), store, slots=32, step_tokens=8,
                     dtype=torch.bfloat16, device=CPU)  # fmt: skip
    watch, generator = Watch(lambda: found), torch.Generator().manual_seed(1)
    x = torch.randn(3, LAYOUT.hidden, generator=generator).bfloat16()
    h = torch.randn(3 * LAYOUT.top_k, LAYOUT.intermediate, generator=generator).bfloat16()
    slots, tokens = torch.tensor([5, 6, 7]), [1, 2, 3]
    found.begin(slots, torch.arange(3), torch.tensor(tokens))
    for layer in LAYOUT.moe_layers:
        with watch.looker.inside(layer):
            calls(watch, x, h)
    found.keep(found.end())
    collected = found.collect(slots, [*tokens, 9], "key")
    return decode(store.get(collected.guidance)), x, h


def same(record, kind, q, step=1):
    for layer in LAYOUT.moe_layers:
        outcome = record.sites[Site(layer, kind)].outcome()
        assert torch.equal(outcome.low, q.codes[::step])
        assert torch.equal(outcome.scales, q.scales[::step])
        torch.testing.assert_close(
            outcome.global_scale.flatten(), q.global_scale.flatten()[::step], rtol=1e-6, atol=0
        )  # fmt: skip


def test_what_the_emulation_rounds_is_recorded_token_by_token_and_slot_by_slot():
    scales = torch.tensor([700.0]), torch.tensor([500.0])

    def calls(watch, x, h):
        for value, scale in zip((x, h), scales, strict=True):
            out = watch.quantize_input(
                moe_kernel_quantize_input,
                A=value,
                A_scale=scale,
                quant_dtype="nvfp4",
                per_act_token_quant=False,
                quantization_emulation=True,
            )
            assert out[0] is value

    record, x, h = watched(calls)
    same(record, Kind.EXPERTS_IN, requantize(x, scales[0]))
    same(record, Kind.EXPERTS_MID, requantize(h, scales[1]))


@pytest.mark.parametrize("tiled", [False, True])
def test_the_experts_input_is_recorded_whatever_the_layout_of_its_scales(tiled):
    scale = torch.full((8,), 700.0)  # One for each expert, all the same: the kernel reads the first.

    def calls(watch, x, h):
        watch.quantize_input(moe_kernel_quantize_input, x, scale, "nvfp4", False, None, is_scale_swizzled=tiled)
        watch.quantize_input(moe_kernel_quantize_input, x, None, None, False, None, quantization_emulation=True)

    record, x, _ = watched(calls)
    same(record, Kind.EXPERTS_IN, quantize_nearest(x, FAST, scale[:3].unsqueeze(1)))


def test_a_scale_for_each_token_is_recorded():
    record, x, _ = watched(lambda watch, x, h: watch.per_token(quantize_nvfp4_per_token_input, x))
    same(record, Kind.EXPERTS_IN, quantize_nearest(x, FAST))


@pytest.mark.parametrize("fused", [False, True])
def test_rows_that_cutlass_sorts_by_expert_find_their_tokens_and_slots(fused):
    shared, own = torch.full((8,), 700.0), torch.arange(8) * 50.0 + 400

    def calls(watch, x, h):
        offsets, scale_offsets = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        a_map, c_map = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        watch.order(
            get_cutlass_moe_mm_data, EXPERTS_CHOSEN, offsets, None, None, a_map, c_map, 8, 0, 0, scale_offsets
        )  # fmt: skip
        rest = offsets, scale_offsets, 2
        watch.sorted_input(scaled_fp4_experts_quant, x[a_map.long()], shared, *rest)
        moved = torch.empty_like(h)
        moved[c_map.long()] = h
        if fused:
            both = torch.cat([moved, torch.ones_like(moved)], dim=1)
            watch.sorted_middle(silu_and_mul_scaled_fp4_experts_quant, both, own, *rest)
        else:
            watch.sorted_input(scaled_fp4_experts_quant, moved, own, *rest)

    record, x, h = watched(calls)
    same(record, Kind.EXPERTS_IN, quantize_nearest(x, FAST, shared[:3].unsqueeze(1)))
    same(record, Kind.EXPERTS_MID, quantize_nearest(h, FAST, own[EXPERTS_CHOSEN.flatten()].unsqueeze(1)))


@pytest.mark.parametrize("rounded_at_dispatch", [False, True])
def test_bins_that_deepep_fills_find_their_tokens_and_slots(rounded_at_dispatch):
    shared, own = torch.full((8,), 700.0), torch.arange(8) * 50.0 + 400
    bins, source = [[] for _ in range(8)], torch.full((8, 4), 99)
    for pair in (5, 4, 0, 3, 1, 2):  # DeepEP's rows come in any order.
        bins[int(EXPERTS_CHOSEN.flatten()[pair])].append(pair)
    for expert, pairs in enumerate(bins):
        source[expert, : len(pairs)] = torch.tensor([pair // 2 for pair in pairs], dtype=torch.int64)
    counts = torch.tensor([len(pairs) for pairs in bins], dtype=torch.int32)

    def grouped(values, scale):
        packed = torch.zeros(8, 4, values.shape[1] // 2, dtype=torch.uint8)
        scales = torch.zeros(8, 128, values.shape[1] // 16, dtype=torch.uint8)
        for expert, pairs in enumerate(bins):
            if pairs:
                q = quantize_nearest(values[pairs], FAST, scale[expert].expand(len(pairs), 1))
                packed[expert, : len(pairs)], scales[expert, : len(pairs)] = e2m1.pack(q.codes), q.scales
        tiled = torch.stack([tile(part) for part in scales])
        return packed.permute(1, 2, 0), tiled.view(8, 1, -1, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)

    class Dispatcher:
        handles = (None, (source, None))

        def num_dispatchers(self):
            return 1

        def prepare_async(self, a1, topk_weights, topk_ids, num_experts, expert_map, on_input, quant_config):
            return "receiver"

    def kernel(hidden_states, input_global_scale, masked_m, workspace):
        return "out"

    def calls(watch, x, h):
        config, values = types.SimpleNamespace(a1_gscale=shared), x.repeat_interleave(2, 0)
        prepare = Dispatcher.prepare_async
        watch.dispatched(prepare, Dispatcher(), x, None, EXPERTS_CHOSEN, 8, None, False, quant_config=config)
        entered = grouped(values, shared)
        hidden = (entered[0].permute(2, 0, 1), entered[1]) if rounded_at_dispatch else torch.zeros(8, 4, LAYOUT.hidden)
        assert watch.masked(kernel, hidden, None, masked_m=counts, workspace=None) == "out"
        if not rounded_at_dispatch:
            watch.masked_input(lambda *_: entered, hidden, counts, shared)
        watch.masked_middle(lambda *_: grouped(h, own), None, counts, own)

    record, x, h = watched(calls)
    same(record, Kind.EXPERTS_IN, quantize_nearest(x, FAST, shared[:3].unsqueeze(1)))
    same(record, Kind.EXPERTS_MID, quantize_nearest(h, FAST, own[EXPERTS_CHOSEN.flatten()].unsqueeze(1)))
    Dispatcher.num_dispatchers = lambda self: 2
    with pytest.raises(EngineError, match="over 2 ranks"):
        watched(calls)


def test_an_emulation_that_rounds_otherwise_is_refused():
    found = recorder()
    watch = Watch(lambda: found)
    x = torch.ones(2, LAYOUT.hidden, dtype=torch.bfloat16)

    def kernel(scale):
        return watch.quantize_input(moe_kernel_quantize_input, x, scale, "nvfp4", False, quantization_emulation=True)

    with pytest.raises(EngineError, match="with one scalar each"), watch.looker.inside(0):
        kernel(torch.ones(8))
    assert kernel(None)[0] is x  # Outside of experts it is none of ours.


STAND_INS = {
    function.__name__: function
    for function in (
        moe_kernel_quantize_input,
        quantize_nvfp4_per_token_input,
        get_cutlass_moe_mm_data,
        scaled_fp4_experts_quant,
        silu_and_mul_scaled_fp4_experts_quant,
    )
}
ARGUMENTS = {
    "prepare_async": {"topk_ids", "quant_config"},
    "flashinfer_cutedsl_moe_masked": {"hidden_states", "masked_m"},
    "convert_to_nvfp4_moe_kernel_format": {"layer", "w13_scale_2", "w2_scale_2"},
    "forward_modular": {"topk_ids"},
}
"""What wrappers take by name out of functions that have no stand-in here."""


@needs_vllm
@pytest.mark.engine
def test_the_tested_release_has_every_function_that_is_watched_with_these_arguments(defined):
    for hook in (*EXPERTS, *HOOKS, LOADED):
        assert callable(getattr(Watch, hook.method))
        found, name = find(hook.target), hook.target.replace(":", ".").rpartition(".")[2]
        if found is None:  # Its module needs DeepEP.
            source = defined(hook.target.replace(":", "."))
            assert source is not None, hook.target
            names = [argument.arg for argument in source.args.args]
        else:
            names = list(inspect.signature(found[2]).parameters)
        if name in STAND_INS:
            assert names == list(inspect.signature(STAND_INS[name]).parameters), name
        assert ARGUMENTS.get(name, set()) <= set(names), name


@needs_vllm
@pytest.mark.engine
def test_the_tested_release_has_every_backend_of_the_table():
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend

    assert {path.backend for path in PATHS if path.backend} <= set(NvFp4MoeBackend.__members__)


@needs_vllm
@pytest.mark.engine
def test_wrappers_go_around_vllms_experts_and_come_off_again():
    found = recorder()
    watch = Watch(lambda: found)
    places = {hook.target: find(hook.target) for hook in (*EXPERTS, *HOOKS, LOADED)}
    original = {target: place[2] for target, place in places.items() if place is not None}
    undo = bind((*EXPERTS, *HOOKS, LOADED), watch)
    try:
        assert bind((*EXPERTS, *HOOKS, LOADED), watch) == []
        prepare = importlib.import_module("vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep")
        assert prepare.moe_kernel_quantize_input is find(f"{MOE}.utils:moe_kernel_quantize_input")[2]
        assert prepare.moe_kernel_quantize_input is not original[f"{MOE}.utils:moe_kernel_quantize_input"]
        seen = []
        experts = importlib.import_module(f"{MOE}.routed_experts").RoutedExperts
        method = types.SimpleNamespace(
            is_monolithic=False, apply=lambda **kwargs: seen.append((watch.looker.here.layer, kwargs["x"]))
        )
        layer = types.SimpleNamespace(layer_name="model.layers.2.mlp.experts", quant_method=method)
        experts.forward_modular(layer, x=1, topk_weights=None, topk_ids=None)
        assert seen == [(2, 1)]
        assert watch.looker.here is None
    finally:
        for step in undo:
            step()
    assert {target: find(target)[2] for target in original} == original


@needs_vllm
@pytest.mark.engine
def test_the_emulations_arithmetic_is_our_preset_bit_for_bit():
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 512, generator=generator) * torch.randn(512, 1, generator=generator).exp()
    x[3], x[5, :16] = 0.0, 0.0
    for values in (x.bfloat16(), x.float()):
        scale = 448 * 6 / values.float().abs().max().reshape(1)
        codes, scales = ref_nvfp4_quant(values, scale, 16)
        ours = requantize(values, scale)
        assert torch.equal(e4m3.decode(ours.scales), scales)
        assert torch.equal(e2m1.decode(ours.codes).abs(), codes.abs())
        assert torch.equal(e2m1.decode(ours.codes), codes)


# -- Seeds


def test_a_draw_that_was_thrown_away_is_taken_back():
    plain, rewinding = torch.Generator().manual_seed(5), RewindingGenerator(device="cpu").manual_seed(5)
    expected = torch.rand(3, generator=plain)
    rewinding.mark()
    torch.rand(1, generator=rewinding)
    rewinding.set_offset(rewinding.get_offset() - 4)  # As vLLM does.
    assert torch.equal(torch.rand(3, generator=rewinding), expected)


def test_generators_of_a_batch_are_replaced_and_only_discarded_draws_rewind():
    requests = {name: types.SimpleNamespace(generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}
    batch = types.SimpleNamespace(
        generators={i: requests[name].generator for i, name in enumerate("ab")}, req_ids=["a", "b"]
    )
    discarded = types.SimpleNamespace(np=[True, False])
    runner = types.SimpleNamespace(input_batch=batch, requests=requests, discard_request_mask=discarded)
    mark_generators(runner)
    first = [torch.rand(1, generator=batch.generators[i]) for i in range(2)]
    assert requests["a"].generator is batch.generators[0]
    batch.generators[0].set_offset(0)
    second = [torch.rand(1, generator=batch.generators[i]) for i in range(2)]
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
