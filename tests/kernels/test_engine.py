"""The engine with kernels gives the tokens and records of the engine without, up to bfloat16 noise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.core import Request, SamplingParams
from tracefp4.errors import FormatError, SyncError
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.models import norms, packing, repeated
from tracefp4.models.experts import experts_forward
from tracefp4.models.key_basis import KeyBasis, random_signs, set_basis
from tracefp4.models.layout import describe
from tracefp4.models.packing import Digest, model_digest
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout import sync
from tracefp4.rollout.embedded import EmbeddedEngine


def make_model(seed=1, width=64, layers=1):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, moe_intermediate_size=width, intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def build(device, spec, compile_decode=False, residual=0.0, **model_options):
    model, store = make_model(**model_options), MemoryStore()
    plan = Plan.parse("r4-all+mid/s8") if spec.activations is not None else None
    engine = EmbeddedEngine(
        model, None, spec, plan, store, device=device, max_tokens=128, max_batch=4, prefill_chunk=32, cuda_graphs=True,
        compile_decode=compile_decode, residual=residual,
    )  # fmt: skip
    return engine, store


QUICK = [] if torch.cuda.is_available() else [pytest.mark.slow, pytest.mark.timeout(300)]


SLOWER = ("nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4", "mxfp4-w4a8-kv4", "mxfp4-w4a16-kv4")


@pytest.mark.parametrize(
    "name",
    ["bf16", *(pytest.param(name, marks=QUICK) for name in SLOWER)],
)
def test_engine_with_and_without_kernels(name, device, monkeypatch):
    request = Request("a", tuple(range(3, 22)), 1, SamplingParams(max_new_tokens=3, seed=1, temperature=0.0))
    engine, store = build(device, get_spec(name))
    assert engine.pool.for_kernels
    with_kernels = engine.generate([request])[0]
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    plain, plain_store = build(device, get_spec(name))
    assert not plain.pool.for_kernels
    without = plain.generate([request])[0]
    assert with_kernels.response_ids[0] == without.response_ids[0]
    assert abs(with_kernels.logprobs[0] - without.logprobs[0]) < 0.1
    assert (with_kernels.guidance is None) == (get_spec(name).activations is None)
    if with_kernels.guidance is None:
        return
    found, expected = decode(store.get(with_kernels.guidance)), decode(plain_store.get(without.guidance))
    assert found.valid.all() and expected.valid.all()
    for site, record in expected.sites.items():
        # One layer: its inputs are computed by the same code, so they are equal; what follows attention is nearly so.
        same = (found.sites[site].planes[:19] == record.planes[:19]).float().mean()
        assert same == 1.0 if site.kind in ("k", "v") else same > 0.9


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param("nvfp4-w4a4-kv4/b1", marks=QUICK[:1])])
def test_kernels_of_both_formats_side_by_side(name, device, monkeypatch):
    """A layer in bfloat16 before one in FP4: each layer's attention and experts read what it stores."""
    request = Request("a", tuple(range(3, 12)), 1, SamplingParams(max_new_tokens=2, seed=1, temperature=0.0))
    engine, store = build(device, get_spec(name), layers=2)
    sites = engine._runner.sites
    assert sites.experts_by_kernel and {layer for layer, _ in sites.kernel_weights} == {0, 1}
    assert [sites.kernel_weights[layer, "down_proj"].scales is None for layer in (0, 1)] == [True, False]
    assert [engine.pool.paged(layer, 1).scales is None for layer in (0, 1)] == [True, False]
    with_kernels = engine.generate([request])[0]
    mine = model_digest(make_model(layers=2), engine.layout, engine.spec.weights, first=1)
    assert engine.digest() == mine
    assert engine.sync(dict(make_model(layers=2).to(device).named_parameters()), 1) == mine
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    plain, plain_store = build(device, get_spec(name), layers=2)
    without = plain.generate([request])[0]
    assert with_kernels.response_ids[0] == without.response_ids[0]
    assert abs(with_kernels.logprobs[0] - without.logprobs[0]) < 0.1
    found, expected = decode(store.get(with_kernels.guidance)), decode(plain_store.get(without.guidance))
    assert (
        found.valid.all()
        and {site.layer for site in found.sites} == {1}
        and found.sites.keys() == expected.sites.keys()
    )
    for site, record in expected.sites.items():
        assert (found.sites[site].planes[:9] == record.planes[:9]).float().mean() > 0.8


def routers_of(engine):
    return [engine.model.get_submodule(name) for name in engine.layout.routers.values()]


@pytest.mark.parametrize("compiled", [False, "eager"])
def test_a_plain_router_is_replaced_by_the_kernel(compiled, device, monkeypatch):
    request = Request("a", (3, 9, 1, 7), 1, SamplingParams(max_new_tokens=3, seed=1, temperature=0.0))
    engine, _ = build(device, get_spec("bf16"), compile_decode=compiled)
    with monkeypatch.context() as patch:
        # Its own code is not even there any more.
        patch.delattr(type(routers_of(engine)[0]), "forward")
        found = engine.generate([request])[0]
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    plain, _ = build(device, get_spec("bf16"))
    assert "forward" not in vars(routers_of(plain)[0])
    expected = plain.generate([request])[0]
    assert found.response_ids[0] == expected.response_ids[0]
    assert (found.routes[:4] == expected.routes[:4]).float().mean() > 0.8  # near ties may fall either way
    engine.close()
    assert "forward" not in vars(routers_of(engine)[0])


def test_other_routers_run_their_own_code(device):
    model = tiny_model("gpt_oss", dtype=torch.bfloat16)
    engine = EmbeddedEngine(model, None, get_spec("bf16"), device=device, max_tokens=64, max_batch=2, prefill_chunk=16)
    assert not any("forward" in vars(router) for router in routers_of(engine))


def kernel_norm(module, keys):
    """The norm of queries or keys with its squares added up in the order of the kernel, and nothing turned."""
    from tracefp4.kernels.kv_append import append_heads, pool_tensors

    form = norms.form_of(module)

    def forward(x):
        rows, (heads, width) = x.flatten(0, 1), x.shape[2:]
        still = torch.ones_like(rows[:1, 0]), torch.zeros_like(rows[:1, 0])
        pool, slots = pool_tensors(len(rows), heads, width, None, x.device), torch.arange(len(rows), device=x.device)
        q = append_heads(rows, rows, rows, pool, None, slots, still, (module.weight, module.weight, *form))
        return (pool.codes.unflatten(1, (heads, 2, width))[:, :, 0] if keys else q).reshape(x.shape)

    return forward


def gated(part, *others):
    """Options of a model with gated queries whose heads of 64 values are turned in ``part``."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part / 64}
    layers = [*others, "full_attention"]
    return {"layer_types": layers, "num_hidden_layers": len(layers), "rope_parameters": rope}


HEADS = {
    "plain": ("mixtral", {"num_hidden_layers": 2}), "window": ("mixtral", {"sliding_window": 3}),
    "normed": ("qwen3_moe", {}), "partial": ("glm4_moe", {"first_k_dense_replace": 0}),
    "gated": ("qwen3_5_moe", gated(16)), "gated, half": ("qwen3_next", gated(32, "linear_attention")),
    "sinks": ("gpt_oss", {}), "basis": ("qwen3_moe", {}),
}  # fmt: skip
"""Family and options of models that differ between their projections and their attention."""
OWN = {"sinks", "basis"}
"""Those whose modules keep their own forward."""


@pytest.fixture
def heads_of_engines(device, monkeypatch):
    """Builds an engine of one of ``HEADS`` and generates, with everything that stores K and V counted."""
    from tracefp4.kernels import kv_append

    launches, more = [], 8 if device.type == "cuda" else 1  # an interpreter takes a while
    for name in ("append", "append_heads"):
        own = getattr(kv_append, name)
        monkeypatch.setattr(kv_append, name, lambda *a, own=own, name=name: launches.append(name) or own(*a))

    def generate(case, spec="bf16", own=False, compiled=False):
        torch._dynamo.reset()
        (family, options), store = HEADS[case], MemoryStore()
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 1}
        model = tiny_model(family, dtype=torch.bfloat16, seed=3, **(sizes | options))
        attentions = [model.get_submodule(path) for path in describe(model).attentions.values()]
        generator = torch.Generator().manual_seed(2)
        for module in attentions:
            for norm in (n for n in (getattr(module, "q_norm", None), getattr(module, "k_norm", None)) if n):
                norm.weight.data += (0.3 * torch.randn(64, generator=generator)).bfloat16()
            if case == "basis":
                set_basis(module, KeyBasis(None, random_signs(64).to(device)))
        engine = EmbeddedEngine(
            model, None, get_spec(spec), None if spec == "bf16" else Plan.parse("r4-all"), store, device=device,
            max_tokens=64 * more, page_size=4, max_batch=4, prefill_chunk=4 * more, compile_decode=compiled,
            cuda_graphs=False, overlap=False,
        )  # fmt: skip
        assert engine.pool.for_kernels
        assert all(("forward" in vars(module)) == (case not in OWN) for module in attentions)
        if own:
            monkeypatch.setattr("tracefp4.rollout.sites._Attention.takes_heads", lambda _: False)
            for module in attentions if case not in OWN and hasattr(attentions[0], "q_norm") else ():
                module.q_norm.forward = kernel_norm(module.q_norm, False)
                module.k_norm.forward = kernel_norm(module.k_norm, True)
        requests = [
            Request(name, tuple(range(3, 3 + length)), samples, SamplingParams(0.0, max_new_tokens=2 + more, seed=1))
            for name, length, samples in (("a", 6 * more, 2), ("b", 3 * more, 1))
        ]
        launches.clear()
        found = sorted(engine.generate(requests), key=lambda r: (r.request_id, r.sample))
        return found, [None if r.guidance is None else decode(store.get(r.guidance)) for r in found], list(launches)

    return generate


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case in ("normed", "gated") else QUICK) for case in HEADS
])  # fmt: skip
@pytest.mark.parametrize("spec", ["nvfp4-kv4", pytest.param("bf16", marks=QUICK)])
def test_heads_of_one_launch_are_those_of_the_model_bit_for_bit(case, spec, heads_of_engines):
    """Uncompiled steps and prefills in pieces behind earlier context: tokens, log-probs and codes."""
    found, records, launches = heads_of_engines(case, spec)
    expected, others, plain = heads_of_engines(case, spec, own=True)
    assert "append" in plain and (case in OWN or set(launches) == {"append_heads"})
    assert case not in OWN or launches == plain
    for one, other, record, same in zip(found, expected, records, others, strict=True):
        assert one.response_ids == other.response_ids and one.logprobs == other.logprobs
        if spec != "bf16":
            assert record.valid.all() and record.sites.keys() == same.sites.keys() and record.sites
            for site, part in same.sites.items():
                assert torch.equal(record.sites[site].planes, part.planes)
                assert torch.equal(record.sites[site].scales, part.scales)


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case == "gated" else QUICK) for case in HEADS if case not in OWN
])  # fmt: skip
def test_compiled_steps_store_and_turn_heads_in_one_launch(case, heads_of_engines):
    """With the roundings of the model's own code; only products of Q, K and V are joined."""
    expected, _, launches = heads_of_engines(case)
    found, _, others = heads_of_engines(case, compiled="eager")
    assert set(launches) == {"append_heads"} and others == launches
    for one, other in zip(expected, found, strict=True):  # a prefill's token, and that of a compiled step
        assert one.response_ids[:2] == other.response_ids[:2]
        assert one.logprobs[:2] == pytest.approx(other.logprobs[:2], abs=2e-2)


@pytest.fixture
def plain_rounding(device, monkeypatch):
    """Weights rounded by the plain code where kernels are interpreted: the same bytes, in less time."""
    if device.type == "cpu":
        for module in ("blocks", "packed"):
            monkeypatch.setattr(f"tracefp4.formats.{module}.has_kernel", lambda *_: False)


@pytest.mark.parametrize("name", ["nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4"])
@pytest.mark.usefixtures("plain_rounding")
def test_experts_take_the_bytes_of_their_codes_and_scales_alone(name, device):
    spec = get_spec(name)
    engine, _ = build(device, spec)
    experts = 4 * 3 * 64 * 64
    whole = 2 * sum(p.numel() for p in make_model().parameters())
    copies = 2 if spec.weights.scale_format == "e8m0" else 1  # lifted for the kernel, and as they are
    packed = experts * (1 / 2 + copies / spec.weights.block)
    # Three float32 scales an expert and projection at most (primary form, and the one that kernels read), an element
    # in the place of a parameter, and the buffers of RoPE.
    assert whole - 2 * experts + packed <= engine.weight_bytes <= whole - 2 * experts + packed + 256
    assert engine.token_bytes == 2 * 64 * (1 / 2 + 1 / spec.kv.block)
    before = engine.weight_bytes
    trainer = make_model(seed=2)
    digest = engine.sync({name: p.detach() for name, p in trainer.named_parameters()}, 1)
    assert digest == engine.digest() == model_digest(trainer, describe(trainer), spec.weights)
    assert engine.weight_bytes == before
    held = dict(engine.model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert held.shape == (4, 64, 64) and held.isnan().all()


@pytest.mark.parametrize(
    "name, compiled",
    [("nvfp4-w4a4-kv4", False), *(pytest.param(*case, marks=QUICK) for case in (
        ("nvfp4-w4a4-kv4", "eager"), ("mxfp4-w4a4-kv4", False), ("mxfp4-w4a8-kv4", False)))],
)  # fmt: skip
@pytest.mark.usefixtures("plain_rounding")
def test_compensated_experts_take_kernels_too(name, compiled, device, monkeypatch):
    """Two terms by the grouped kernel, without a float32 sum: records and log-probs are those of the plain code."""
    spec, request = get_spec(name), Request("a", (3, 9, 1, 7, 5), 1, SamplingParams(max_new_tokens=2, temperature=0.0))

    def generate(**options):
        torch._dynamo.reset()
        engine, store = build(device, spec, **options)
        rollout = engine.generate([request])[0]
        return engine, rollout, decode(store.get(rollout.guidance))

    def experts(engine):
        """What the layer makes of some hidden states, beside any request."""
        module = engine.model.get_submodule(next(iter(engine.layout.experts.values())))
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [0, 3]], device=device)
        batch = SimpleNamespace(slots=torch.arange(5, device=device), tickets=torch.ones_like(chosen[:, 0]).int())
        monkeypatch.setattr(engine._runner.sites, "batch", batch)
        with torch.no_grad():
            return experts_forward(module, x, chosen, torch.full((5, 2), 0.5, device=device)).float()

    def never(*_):
        raise AssertionError("the terms were added up")

    with monkeypatch.context() as patch:
        patch.setattr("tracefp4.models.sites.Operand.whole", never)
        engine, found, record = generate(residual=0.5, compile_decode=compiled)
        by_kernel = experts(engine)
    assert engine._runner.sites.experts_by_kernel
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    engine, expected, plain = generate(residual=0.5)
    assert not engine._runner.sites.experts_by_kernel
    whole = experts(engine)
    assert (by_kernel - whole).norm() < 0.02 * whole.norm()  # without the second term of either: 0.08 and 0.13
    assert found.response_ids == expected.response_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=0.05)
    assert record.valid.all() and plain.valid.all() and record.sites.keys() == plain.sites.keys()
    for site, one in plain.sites.items():
        same = (record.sites[site].planes[:5] == one.planes[:5]).float().mean()
        assert same == 1.0 if site.kind in ("k", "v") else same > 0.95


@pytest.mark.usefixtures("plain_rounding")
def test_packed_weights_are_served_and_proved(device):
    spec = get_spec("nvfp4-w4a4-kv4")
    engine, _ = build(device, spec)
    names = [name for name, _ in engine.model.named_parameters() if ".experts." in name]
    kept = {name: engine._weights.packed(name) for name in names}
    before, codes = engine.digest(), kept[names[0]].codes.clone()
    engine.sync({name: p.detach() for name, p in make_model(seed=2).named_parameters()}, 1)
    assert engine.digest() != before
    state = {name: p.detach() for name, p in make_model().named_parameters()}
    assert engine.sync(state | kept, 2) == before
    assert torch.equal(engine._weights.packed(names[0]).codes, codes)
    with pytest.raises(SyncError, match="no quantized weight"):
        engine._weights.packed("lm_head.weight")


@pytest.mark.parametrize("name", ["bf16", "nvfp4-w4a4-kv4", "mxfp4-w4a4-kv4"])
@pytest.mark.usefixtures("plain_rounding")
def test_syncs_that_are_repeated_prove_what_they_put_in_place(name, device, monkeypatch, rerun):
    """From the third sync from the same tensors and the second checksum on, they are those of graphs."""
    replays = []

    def counting():
        def counted(replay):
            return lambda: (replays.append(1), replay())[1]

        return lambda bodies: [(results, counted(replay)) for results, replay in rerun(bodies)]

    if device.type == "cpu":
        monkeypatch.setattr(repeated, "cuda_graphs", counting)
        for module in (packing, sync):
            monkeypatch.setattr(module, "addresses", lambda tensors: tuple(t.data_ptr() for t in tensors))
    spec = get_spec(name)
    engine, _ = build(device, spec)
    trainer, digest = make_model(seed=2).to(device), Digest()
    layout, seen = describe(trainer), set()
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(1.0 + 1.0 / version)
        found = engine.sync(dict(trainer.named_parameters()), version)
        assert found == model_digest(trainer, layout, spec.weights, digest=digest)
        assert found == model_digest(trainer, layout, spec.weights) == engine.digest()
        seen.add(found)
    assert len(seen) == 5
    fresh, _ = build(device, spec, seed=2)
    fresh.sync({n: p.detach().clone() for n, p in trainer.named_parameters()}, 1)
    kept = engine._weights._kernel_weights
    for key, weight in fresh._weights._kernel_weights.items():
        for part in ("values", "scales", "alpha"):
            one, other = getattr(weight, part), getattr(kept[key], part)
            assert one is None or torch.equal(one, other)
    assert device.type != "cpu" or len(replays) >= 3
    assert engine._weights._loads.failure is None and engine._weights._digest._repeated.failure is None
    if name.startswith("mxfp4"):  # what a replay found is looked at as well
        with torch.no_grad():
            down = trainer.get_submodule("model.layers.0.mlp.experts").down_proj
            down[2, 0, :32], down[2, 1, :32] = 1e-30, 1e30
        with pytest.raises(
            FormatError, match=r"expert 2 of a weight model\.layers\.0\.mlp\.experts\.down_proj .* octaves"
        ):
            engine.sync(dict(trainer.named_parameters()), 6)
        with pytest.raises(SyncError):
            engine.digest()


@pytest.mark.usefixtures("plain_rounding")
def test_a_layer_that_the_kernel_cannot_take_keeps_its_parameters(device):
    engine, _ = build(device, get_spec("nvfp4-w4a4-kv4"), width=32)
    held = dict(engine.model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    assert held.isfinite().all() and held.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_sync_needs_the_memory_of_one_projection_more(device):
    spec = get_spec("nvfp4-w4a4-kv4")
    engine, _ = build(device, spec, width=4096)
    state = {name: p.detach() for name, p in make_model(seed=2, width=4096).named_parameters()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.sync(state, 1)
    projection = 2 * state["model.layers.0.mlp.experts.gate_up_proj"].numel()
    assert torch.cuda.max_memory_allocated() - before < 3 * projection
