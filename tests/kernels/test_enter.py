"""The launch before the experts of a decode step: what the separate steps make, and the steps that ask for it."""

from __future__ import annotations

import pytest
import torch

from tracefp4.core import Kind, Request, SamplingParams, Site
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import decode
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.rounding import round_nearest, round_normed
from tracefp4.kernels import enter, experts
from tracefp4.models.norms import plain_norm
from tracefp4.models.tiny import tiny_model
from tracefp4.rollout.embedded import EmbeddedEngine

QUICK = [] if torch.cuda.is_available() else [pytest.mark.slow, pytest.mark.timeout(900)]
SIZES = {"head_dim": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1, "num_experts": 4, "seed": 3}
"""Of a model whose experts and cache kernels take."""
NAMES = ["nvfp4-te", "nvfp4-modelopt", "nvfp4-pow2", "mxfp4-ceil", "mxfp8"]


def parts_of(make_values, width, device, kind="normal"):
    x, added = (make_values(7, width, kind, seed).to(device) for seed in (1, 2))
    return x, added, make_values(1, width, "normal", 3)[0].to(device)


@pytest.mark.parametrize("name, width", [*((name, 96) for name in NAMES), ("nvfp4-te", 2048), ("mxfp4-ceil", 2080)])
@pytest.mark.parametrize("offset", [False, True])
def test_rounds_as_the_separate_steps(name, width, offset, device, make_values, capture_of, same):
    _, n = capture_of(name, width, 2, device)
    x, added, weight = parts_of(make_values, width, device, "wide")
    hidden, normed, found = round_normed(x, added, weight, 1e-5, n, 2, offset=offset)
    assert same(hidden, x + added)
    # The squares are added up in another order, so now and then a value is the next one.
    expected = plain_norm(hidden, weight, 1e-5, offset)
    assert (normed.float() - expected.float()).abs().le(2.0**-7 * expected.float().abs()).all()
    assert (normed == expected).float().mean() > 0.99
    other = round_nearest(normed, n, 2)
    assert (
        same(found.factor(), other.factor()) and same(found.scales, other.scales) and same(found.planes, other.planes)
    )
    if other.decode is not None:
        assert same(found.decode, other.decode) and same(found.global_scale, other.global_scale)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ceil"])
def test_records_what_is_recorded_of_its_results(name, device, make_values, capture_of, same):
    width, site = 96, Site(1, Kind.EXPERTS_IN)
    slots = torch.tensor([7, 0, 8, 3, 1, 2, 6], device=device)
    tickets = torch.arange(5, 12, dtype=torch.int32, device=device)
    found, n = capture_of(name, width, 3, device)
    expected, _ = capture_of(name, width, 3, device)
    x, added, weight = parts_of(make_values, width, device)
    _, normed, rounding = round_normed(x, added, weight, 1e-6, n, 3, place=found.place(site, slots, tickets))
    assert rounding.planes is None
    expected.write(site, round_nearest(normed, n, 3), slots, tickets, None)
    assert same(found._rows, expected._rows)


def test_rows_that_are_laid_out_otherwise_are_left_alone(device, make_values, capture_of):
    _, n = capture_of("nvfp4-te", 96, 1, device)
    x, added, weight = parts_of(make_values, 96, device)
    assert round_normed(x, added.float(), weight, 1e-6, n) is None
    assert round_normed(x.t().contiguous().t(), added, weight, 1e-6, n) is None


@pytest.mark.parametrize("width", [80, 1100])
def test_the_sum_of_experts_takes_the_residual(width, device, make_values, same):
    rows, added = make_values(6, width, "normal", 1).to(device), make_values(3, width, "normal", 2).to(device)
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).to(device)
    assert same(experts.weighted_sum(rows, weights, added), experts.weighted_sum(rows, weights) + added)


@pytest.mark.parametrize("name", ["bf16", pytest.param("nvfp4-w4a4-kv4", marks=QUICK)])
def test_compiled_steps_enter_and_leave_experts_in_one_launch(name, device, monkeypatch):
    launches = []
    for module, kernel in ((enter, "enter"), (experts, "weighted_sum")):
        own = getattr(module, kernel)

        def counted(*args, own=own, kernel=kernel, **options):
            launches.append((kernel, len(args[0]), len(args)))
            return own(*args, **options)

        monkeypatch.setattr(module, kernel, counted)

    def generate(compiled):
        torch._dynamo.reset()
        store, plan = MemoryStore(), None if name == "bf16" else Plan.parse("r4-all+mid")
        model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **SIZES)
        engine = EmbeddedEngine(
            model, None, get_spec(name), plan, store, device=device, max_tokens=64, max_batch=2,
            prefill_chunk=32, cuda_graphs=False, compile_decode=compiled,
        )  # fmt: skip
        request = Request("a", (3, 9, 1, 7), 2, SamplingParams(max_new_tokens=2, seed=1, temperature=0.0))
        return engine.generate([request]), store

    fused, store = generate("eager")
    # The last token is sampled and not run. Two sequences, two experts each: four rows, and the residual beside them.
    assert launches.count(("enter", 2, 6)) == (0 if name == "bf16" else 1)
    assert [entry for entry in launches if entry[0] == "weighted_sum" and entry[1] == 4][-1][2] == 3
    launches.clear()
    plain, plain_store = generate(False)
    assert not [entry for entry in launches if entry[0] == "enter"]
    for one, other in zip(fused, plain, strict=True):
        assert one.response_ids == other.response_ids
        assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < 0.02
        if name == "bf16":
            continue
        found, expected = (decode(s.get(r.guidance)) for s, r in ((store, one), (plain_store, other)))
        assert found.valid.all()
        for site, record in expected.sites.items():
            # Other orders of adding squares up: few codes change.
            assert (found.sites[site].planes == record.planes).float().mean() > 0.95
