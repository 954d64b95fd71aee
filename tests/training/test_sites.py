"""The trainer's sites: fake quantization, guidance row by row, fallback, replay, and gradients through all of it."""

import dataclasses

import pytest
import torch

from tracefp4.core import Site
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.record import Record, SiteRecord, token_hash
from tracefp4.models.binding import bind, unbind
from tracefp4.models.layout import describe
from tracefp4.models.tiny import FAMILIES, tiny_model
from tracefp4.training.batch import Example, collate, plan_micro_batches
from tracefp4.training.observe import Observer
from tracefp4.training.policy import recompute_layers, token_logprobs
from tracefp4.training.sites import TrainerSites

SPEC = get_spec("nvfp4-w4a4-kv4")


class Recorder(TrainerSites):
    """Trainer sites that keep every unguided outcome: the rollout of a perfect twin."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen: dict[Site, tuple[Quantized, torch.Tensor | None]] = {}

    def quantize(self, site, x, numerics, rows=None):
        q = super().quantize(site, x, numerics, rows)
        self.seen[site] = (q, rows)
        return q

    def record(self, tokens, bits=1):
        sites = {}
        for site, (q, rows) in self.seen.items():
            shape = self.shapes[site]
            scale = q.global_scale if shape.token_scale else None
            codes, scales = q.codes, q.scales
            if rows is not None:
                order = torch.empty_like(rows)
                order[rows] = torch.arange(len(rows))
                codes, scales = codes[order], scales[order]
                scale = None if scale is None else scale[order]
            view = (-1, shape.vectors)
            sites[site] = SiteRecord.pack(
                shape,
                codes.view(*view, shape.width),
                scales.view(*view, shape.width // shape.block),
                None if scale is None else scale.reshape(view),
                bits,
            )
        rows = len(tokens) - 1
        return Record("r1-all+mid", token_hash(tokens), SPEC.hash, 0, rows, torch.ones(rows, dtype=torch.bool), sites)


def _tokens(n, seed=0):
    return tuple(torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def _logprobs(model, sites, examples, guided=True, observer=None, **kwargs):
    batch = collate(examples, torch.device("cpu"))
    with torch.no_grad(), sites.batch(batch, guided=guided, observer=observer, **kwargs):
        return token_logprobs(model, batch)[0]


def _recorded(family, bits=1, seed=0, n=12):
    model = tiny_model(family, 0)
    recorder = Recorder(describe(model), SPEC)
    bind(model, recorder)
    tokens = _tokens(n, seed)
    _logprobs(model, recorder, [Example(tokens, 4)])
    record = recorder.record(tokens, bits)
    unbind(model)
    return model, tokens, record


@pytest.mark.parametrize("family", FAMILIES)
def test_own_outcomes_as_guidance_change_nothing(family):
    model, tokens, record = _recorded(family)
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    plain = _logprobs(model, sites, [Example(tokens, 4)])
    guided = _logprobs(model, sites, [Example(tokens, 4, record=record)])
    assert torch.equal(plain, guided)
    assert plain.abs().sum() > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_foreign_outcomes_are_followed_and_counted(family):
    model, tokens, record = _recorded(family, bits=4)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p.dtype))
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    unguided, guided = Observer(), Observer()
    truth = collate([Example(tokens, 4, record=record)], torch.device("cpu")).guidance
    unguided.truth, guided.truth = truth, truth
    _logprobs(model, sites, [Example(tokens, 4)], observer=unguided)
    _logprobs(model, sites, [Example(tokens, 4, record=record)], observer=guided)
    assert set(guided.counts) == set(record.sites)
    assert guided.totals()["wrong_code_rate"] < unguided.totals()["wrong_code_rate"]
    assert guided.totals()["relative_difference"] < unguided.totals()["relative_difference"]


def test_results_do_not_depend_on_batch_padding_or_order():
    model, tokens, record = _recorded("qwen3_moe")
    other, other_record = _tokens(19, 7), None
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    alone = _logprobs(model, sites, [Example(tokens, 4, record=record)])
    with_other = _logprobs(
        model, sites, [Example(other, 5, record=other_record, index=1), Example(tokens, 4, record=record)]
    )
    torch.testing.assert_close(with_other[1, : alone.shape[1]], alone[0], atol=0.03, rtol=0)
    assert torch.equal(with_other[1, alone.shape[1] :], torch.zeros(with_other.shape[1] - alone.shape[1]))


def test_rows_without_guidance_round_alone():
    model, tokens, record = _recorded("olmoe", bits=4)
    broken = {
        site: dataclasses.replace(r, planes=torch.randint_like(r.planes, 256), scales=r.scales.flip(-1))
        for site, r in record.sites.items()
    }
    nothing = dataclasses.replace(record, sites=broken, valid=torch.zeros_like(record.valid))
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    plain = _logprobs(model, sites, [Example(tokens, 4)])
    assert torch.equal(plain, _logprobs(model, sites, [Example(tokens, 4, record=nothing)]))
    assert not torch.equal(
        plain, _logprobs(model, sites, [Example(tokens, 4, record=dataclasses.replace(nothing, valid=record.valid))])
    )


def test_gradients_are_those_of_checkpointed_layers_and_reach_everything():
    model, tokens, record = _recorded("qwen3_moe")
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    batch = collate([Example(tokens, 4, record=record)], torch.device("cpu"))
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            recompute_layers(model)
            model.train()
        with sites.batch(batch):
            token_logprobs(model, batch)[0].sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
    for part in ("q_proj", "k_proj", "v_proj", "mlp.gate.weight", "gate_up_proj", "down_proj", "embed_tokens"):
        assert any(part in name and grad.abs().sum() > 0 for name, grad in grads[0].items()), part


def test_micro_batches_hold_every_example_once_within_the_budget():
    examples = [Example(_tokens(n, n), 2, index=i) for i, n in enumerate((5, 30, 7, 7, 40, 12))]
    groups = plan_micro_batches(examples, 60)
    assert sorted(e.index for g in groups for e in g) == list(range(6))
    assert all(len(g) == 1 or len(g) * max(e.rows for e in g) <= 60 for g in groups)


def test_congruent_scales_are_checked():
    model, tokens, record = _recorded("qwen3_moe", bits=1)
    congruent = dataclasses.replace(
        record, sites={site: r.reduce(1, 3, record.valid) for site, r in record.sites.items()}
    )
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    other = Example(_tokens(30, 3), 4, index=1)
    plain = _logprobs(model, sites, [Example(tokens, 4, record=record), other])
    assert sites.checks.take() is None
    assert torch.equal(plain, _logprobs(model, sites, [Example(tokens, 4, record=congruent), other]))
    assert sites.checks.take() == 0
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p.dtype))
    _logprobs(model, sites, [Example(tokens, 4, record=congruent), other])
    failures = sites.checks.take()
    assert failures is not None
    assert failures > 0.05


def test_padding_of_a_fully_guided_batch_is_harmless():
    model, tokens, record = _recorded("qwen3_moe")
    short = Example(
        tokens[:7],
        4,
        record=dataclasses.replace(
            record, rows=6, valid=record.valid[:6], sites={site: r.slice(0, 6) for site, r in record.sites.items()}
        ),
        index=1,
    )
    sites = TrainerSites(describe(model), SPEC)
    bind(model, sites)
    both = _logprobs(model, sites, [Example(tokens, 4, record=record), short])
    alone = _logprobs(model, sites, [short])
    assert torch.isfinite(both).all()
    torch.testing.assert_close(both[1, :6], alone[0], atol=0.03, rtol=0)


def test_routes_that_are_all_known_need_no_choice_and_padding_repeats_them():
    routes = torch.randint(0, 8, (5, 3, 2), generator=torch.Generator().manual_seed(0))
    short, long = (Example(_tokens(n + 1, n), 2, routes=routes[:n]) for n in (2, 5))
    found = collate([long, short], torch.device("cpu")).routes
    assert found is not None
    assert found.known is None
    experts = found.experts.unflatten(1, (2, 5)).transpose(0, 2)
    assert torch.equal(experts[:, 0], routes)
    assert torch.equal(experts[:, 1], routes[[0, 1, 0, 1, 0]])
    some = collate([long, Example(_tokens(4, 1), 2)], torch.device("cpu")).routes
    assert some is not None and some.known is not None
    assert torch.equal(
        some.known.unflatten(1, (2, 5))[:, :, :, 0], torch.tensor([[True] * 5, [False] * 5]).expand(3, 2, 5)
    )


def test_recorded_routes_of_all_layers_are_sorted_once():
    model, tokens, _ = _recorded("qwen3_moe")
    layout = describe(model)
    sites = TrainerSites(layout, SPEC)
    count, shapes = len(layout.moe_layers), []

    def sort(experts):
        shapes.append(tuple(experts.shape))
        return list(experts)

    batch = collate([Example(tokens[:5], 2, routes=torch.zeros(4, count, 2, dtype=torch.int16))], torch.device("cpu"))
    for _ in range(2):
        with sites.batch(batch):
            for layer in (*layout.moe_layers, *layout.moe_layers):
                chosen = sites.router(layer).route(torch.ones(4, 2, dtype=torch.int64))
                assert chosen is not None
                assert sites.experts(layer).sorted(chosen, sort).data_ptr() == chosen.data_ptr()
            sites.experts(layout.moe_layers[0]).sorted(torch.ones(4, 2), sort)
    assert shapes == [(count, 4, 2), (1, 4, 2)] * 2


@pytest.mark.parametrize("known", [(0, 1, 2, 3), (0, 2), ()])
def test_rows_without_a_route_keep_the_routers_own(known):
    model, tokens, _ = _recorded("qwen3_moe")
    layout = describe(model)
    sites = TrainerSites(layout, SPEC)
    routes = torch.randint(
        0, layout.num_experts, (4, len(layout.moe_layers), 2), generator=torch.Generator().manual_seed(1)
    )
    routes[[row for row in range(4) if row not in known]] = -1
    own = torch.full((4, 2), 7)
    with sites.batch(collate([Example(tokens[:5], 2, routes=routes)], torch.device("cpu"))):
        chosen = sites.router(layout.moe_layers[1]).route(own)
    assert chosen is not None
    for row in range(4):
        assert torch.equal(chosen[row], routes[row, 1] if row in known else own[row])
