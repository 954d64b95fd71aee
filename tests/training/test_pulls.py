"""Checked plans in the trainer: results are those of the bits themselves, few bits are pulled, and no miss passes."""

import dataclasses

import pytest
import torch

from tracefp4.core import Site
from tracefp4.errors import GuidanceCorrupt, GuidanceMissing
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, restrict, token_hash
from tracefp4.models.binding import bind, bound
from tracefp4.models.layout import describe
from tracefp4.models.tiny import tiny_model
from tracefp4.training.batch import Example, collate
from tracefp4.training.observe import Observer
from tracefp4.training.policy import recompute_layers, token_logprobs
from tracefp4.training.pulls import PullCounts
from tracefp4.training.sites import TrainerSites

FP4 = get_spec("nvfp4-w4a4-kv4")


class Twin(TrainerSites):
    """Sites of a trainer that keep what they quantize, as a rollout would."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = {}

    def quantize(self, site, x, numerics, rows=None):
        self.seen[site] = (super().quantize(site, x, numerics, rows), rows)
        return self.seen[site][0]

    def record(self, tokens, absent=()):
        rows, sites = len(tokens) - 1, {}
        valid = torch.ones(rows, dtype=torch.bool)
        valid[list(absent)] = False
        for site, (q, order) in self.seen.items():
            shape = self.shapes[site]
            back = slice(None) if order is None else torch.argsort(order)
            parts = [part[back].unflatten(0, (-1, shape.vectors)) for part in (q.codes, q.scales)]
            wide = q.global_scale[back].view(-1, shape.vectors) if shape.token_scale else None
            sites[site] = SiteRecord.pack(shape, *parts, wide, 4, valid=valid)
        return Record("r4-all+mid", token_hash(tokens), self.spec.hash, 0, rows, valid, sites)


@dataclasses.dataclass
class Case:
    model: torch.nn.Module
    spec: object
    examples: list[Example]
    """With whole codes."""

    def under(self, plan):
        layout = describe(self.model)
        shapes, parsed = layout.site_shapes(self.spec), Plan.parse(plan)

        def cut(example):
            record = restrict(example.record, parsed, shapes, layout.num_layers)
            return dataclasses.replace(example, record=record)

        return [example if example.record is None else cut(example) for example in self.examples]

    def sites(self):
        return TrainerSites(describe(self.model), self.spec)


def make_case(family="qwen3_moe", spec=FP4, noise=0.004, seed=0):
    """Rollouts of a twin, and a trainer whose weights differ a little from its."""
    model = tiny_model(family, seed)
    twin = Twin(describe(model), spec)
    examples = []
    with bound(model, twin), torch.no_grad():
        for index, (count, absent) in enumerate(((21, ()), (34, (3, 17, 18)), (12, ()))):
            generator = torch.Generator().manual_seed(100 * seed + index)
            tokens = tuple(torch.randint(3, 200, (count,), generator=generator).tolist())
            twin.seen.clear()
            token_logprobs(model, collate([Example(tokens, 4)], torch.device("cpu")))
            record = None if index == 2 else twin.record(tokens, absent)
            examples.append(Example(tokens, 4, record=record, index=index))
    with torch.no_grad():
        for p in model.parameters():
            generator = torch.Generator().manual_seed(p.numel())
            p.mul_(1.0 + noise * torch.randn(p.shape, generator=generator).to(p.dtype))
    return Case(model, spec, examples)


@pytest.fixture(scope="module")
def case():
    return make_case()


def score(model, sites, examples, observer=None):
    batch = collate(examples, torch.device("cpu"))
    with torch.no_grad(), sites.batch(batch, observer=observer):
        return token_logprobs(model, batch)[0]


@pytest.mark.parametrize(
    ("family", "spec", "plan"),
    [
        ("qwen3_moe", "nvfp4-w4a4-kv4", "1-all+mid/s2"),
        ("qwen3_moe", "nvfp4-w4a4-kv4", "1-l1"),
        ("gpt_oss", "nvfp4-w4a4-kv4", "2-all+mid/s3"),
        ("deepseek_v3", "nvfp4-w4a4-kv4", "4-all+mid"),
        ("qwen3_moe", "mxfp4-w4a8-kv4", "1-all+mid/s2"),
        ("qwen3_5_moe", "mxfp4-w4a4-kv4", "1-all:experts+mid/s2"),
    ],
)
def test_results_are_those_of_the_bits_themselves(family, spec, plan):
    case = make_case(family, get_spec(spec))
    sites = case.sites()
    with bound(case.model, sites):
        expected = score(case.model, sites, case.under(f"r{plan}"))
        assert sites.pulled.take() is None
        sites.checks.take()
        found = score(case.model, sites, case.under(f"c{plan}"))
        alone = score(case.model, sites, [dataclasses.replace(e, record=None) for e in case.examples])
    assert torch.equal(found, expected) and not torch.equal(found, alone)
    counts = sites.pulled.take()
    chosen = Plan.parse(f"r{plan}").select(sites.shapes.values(), describe(case.model).num_layers)
    rows = sum(int(e.record.valid.sum()) for e in case.examples if e.record is not None)
    assert counts.vectors == rows * sum(shape.vectors for shape in chosen)
    # Behind a layer that nobody guides everything flips.
    assert counts.share == 1 if plan == "1-l1" else 0 < counts.share < 1
    assert sites.pulled.take() is None


def test_a_perfect_twin_pulls_nothing():
    case = make_case(noise=0.0)
    sites = case.sites()
    asked = [dataclasses.replace(e, record=e.record and dataclasses.replace(e.record, pull=None)) for e in
             case.under("c1-all+mid/s2")]  # fmt: skip
    with bound(case.model, sites):
        score(case.model, sites, asked[:1])
    assert sites.pulled.take() == PullCounts(20 * (1 + 2 + 2 + 2) * 2)


def test_only_what_fails_is_pulled(case):
    asked: list[tuple[int, Site, int]] = []

    def spying(example):
        def pull(site, rows):
            asked.extend((example.index, site, row) for row in rows)
            return example.record.pull(site, rows)

        record = example.record and dataclasses.replace(example.record, pull=pull)
        return dataclasses.replace(example, record=record)

    sites = case.sites()
    with bound(case.model, sites):
        batch = collate([spying(example) for example in case.under("c1-all+mid/s2")], torch.device("cpu"))
        for _ in range(2):  # the second time everything is known
            with torch.no_grad(), sites.batch(batch):
                token_logprobs(case.model, batch)
    assert len(set(asked)) == len(asked) > 0
    assert all(case.examples[index].record.valid[row] for index, _, row in asked)
    counts = sites.pulled.take()
    assert counts.pulled == sum(sites.shapes[site].vectors for _, site, _ in asked)
    assert counts.pulled_bytes == sum(sites.shapes[site].values // 8 for _, site, _ in asked)


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_the_bits_themselves(recomputed):
    case = make_case()
    if recomputed:
        recompute_layers(case.model)
        case.model.train()
    sites, grads, pulled = case.sites(), [], []
    bind(case.model, sites)
    for plan in ("r1-all+mid/s2", "c1-all+mid/s2"):
        batch = collate(case.under(plan), torch.device("cpu"))
        with sites.batch(batch):
            token_logprobs(case.model, batch)[0].sum().backward()
        grads.append({name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None})
        pulled.append(sites.pulled.take())
        case.model.zero_grad()
    assert grads[0].keys() == grads[1].keys() and pulled[0] is None and pulled[1].pulled > 0
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
    # The second pass over a layer pulls nothing: counts are those of a forward without gradient.
    score(case.model, sites, case.under("c1-all+mid/s2"))
    assert sites.pulled.take() == pulled[1]


def test_an_observer_sees_what_it_sees_of_the_bits(case):
    totals = []
    for plan in ("r1-all+mid/s2", "c1-all+mid/s2"):
        sites, observer = case.sites(), Observer()
        with bound(case.model, sites):
            score(case.model, sites, case.under(plan), observer)
        totals.append(observer.totals())
    assert totals[0] == totals[1] and totals[0]["flip_rate"] > 0


def test_bits_that_are_not_the_recorded_ones_are_refused(case):
    def altered(change):
        def alter(example):
            def pull(site, rows):
                return change(example.record.pull(site, rows).clone())

            return dataclasses.replace(example, record=dataclasses.replace(example.record, pull=pull))

        return [alter(example) for example in case.under("c1-all+mid/s2")[:2]]

    def flip(bits):
        bits[-1, -1, -1] ^= 64
        return bits

    sites = case.sites()
    with bound(case.model, sites):
        for change, message in (
            (flip, "do not pass their checks"),
            (lambda bits: bits[1:], "was pulled, not uint8"),
            (lambda bits: bits[..., 1:], "was pulled, not uint8"),
            (lambda bits: bits.to(torch.int32), "was pulled, not uint8"),
        ):
            with pytest.raises(GuidanceCorrupt, match=message):
                score(case.model, sites, altered(change))
        nobody = [dataclasses.replace(e, record=dataclasses.replace(e.record, pull=None)) for e in altered(flip)]
        with pytest.raises(GuidanceMissing, match="nobody to pull the bits from"):
            score(case.model, sites, nobody)
