"""Checked plans in the trainer: results are those of the bits themselves, few bits are pulled, and no miss passes."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracefp4.core import Site
from tracefp4.errors import GuidanceCorrupt, GuidanceMissing
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, restrict, token_hash
from tracefp4.guidance.store import Source
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
        return Record("r4-all+mid/s8", token_hash(tokens), self.spec.hash, 0, rows, valid, sites)


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
    asked = [dataclasses.replace(e, record=e.record and dataclasses.replace(e.record, source=None)) for e in
             case.under("c1-all+mid/s2")]  # fmt: skip
    with bound(case.model, sites):
        score(case.model, sites, asked[:1])
    assert sites.pulled.take() == PullCounts(20 * (1 + 2 + 2 + 2) * 2)


def test_only_what_fails_is_pulled(case):
    asked: list[tuple[int, Site, int]] = []

    def spying(example):
        def pull(site, wanted):
            ((_, rows),) = wanted
            asked.extend((example.index, site, row) for row in rows.tolist())
            return own.pull(site, [(own.key, rows)])

        own = example.record and example.record.source
        record = example.record and dataclasses.replace(example.record, source=Source(pull, None))
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


def test_a_site_is_settled_in_as_many_calls_and_copies_however_many_sequences_there_are(case):
    """All sequences are asked for in one call, and what PyTorch does is as much."""
    calls, operations = [], []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations[-1] += 1
            return func(*args, **(kwargs or {}))

    class Settling(TrainerSites):
        def _recorded(self, *given):
            with Counting():
                return super()._recorded(*given)

    def ask(site, wanted):
        calls[-1].append((site, len(wanted)))
        before = operations[-1]
        found = [bits for own, rows in wanted for bits in own.pull(site, [(own.key, rows)])]
        operations[-1] = before  # not of the trainer
        return found

    example = case.under("c1-all+mid/s2")[1]
    record = dataclasses.replace(example.record, source=Source(ask, example.record.source))
    sites = Settling(describe(case.model), FP4)
    with bound(case.model, sites):
        for count in (1, 5):
            calls.append([])
            operations.append(0)
            score(case.model, sites, [dataclasses.replace(example, record=record)] * count)
    one, five = calls
    assert [site for site, _ in one] == [site for site, _ in five] == list(dict.fromkeys(site for site, _ in one))
    assert {count for _, count in one} == {1} and {count for _, count in five} == {5}
    assert operations[0] == operations[1] > 0


def altered(case, change, which=(0, 1)):
    """Examples of which some get other bits than the recorded ones."""

    def alter(example):
        def pull(site, wanted):
            return [change(bits.copy()) for bits in own.pull(site, [(own.key, rows) for _, rows in wanted])]

        own = example.record.source
        return dataclasses.replace(example, record=dataclasses.replace(example.record, source=Source(pull, None)))

    return [alter(e) if e.index in which else e for e in case.under("c1-all+mid/s2")[:2]]


def flip(bits):
    bits[-1, -1, -1] ^= 64
    return bits


def test_bits_that_are_not_the_recorded_ones_are_refused(case):
    sites = case.sites()
    with bound(case.model, sites):
        for change, message in (
            (flip, "do not pass their checks"),
            (lambda bits: bits[1:], "was pulled, not uint8"),
            (lambda bits: bits[..., 1:], "was pulled, not uint8"),
            (lambda bits: bits.astype(np.int32), "was pulled, not uint8"),
        ):
            with pytest.raises(GuidanceCorrupt, match=message):
                score(case.model, sites, altered(case, change))
        nobody = [
            dataclasses.replace(e, record=dataclasses.replace(e.record, source=None)) for e in altered(case, flip)
        ]
        with pytest.raises(GuidanceMissing, match="sequence 0 has checks of bits and nobody to pull the bits from"):
            score(case.model, sites, nobody)
        with pytest.raises(GuidanceMissing, match="sequence 1 has checks"):
            score(case.model, sites, [altered(case, flip, ())[0], nobody[1]])


@pytest.mark.parametrize("sequence", [0, 1])
def test_wrong_bits_are_refused_by_site_and_sequence(case, sequence):
    """At whatever site, also at the last, and whenever the micro-batch is used again."""
    order: list[Site] = []

    def noting(site, wanted):
        order.append(site)
        return own.pull(site, [(own.key, rows) for _, rows in wanted])

    examples = altered(case, flip, ())
    own = examples[sequence].record.source
    examples[sequence].record.source = Source(noting, None)
    sites = case.sites()
    with bound(case.model, sites):
        score(case.model, sites, examples)
        for wrong in (order[0], order[-1]):

            def pull(site, wanted, wrong=wrong):
                found = own.pull(site, [(own.key, rows) for _, rows in wanted])
                return [flip(bits.copy()) for bits in found] if site == wrong else found

            examples[sequence].record.source = Source(pull, None)
            batch = collate(examples, torch.device("cpu"))
            message = f"site {wrong}: bits that were pulled for sequence {sequence} do not pass their checks"
            for _ in range(2):
                with pytest.raises(GuidanceCorrupt, match=message), torch.no_grad(), sites.batch(batch):
                    token_logprobs(case.model, batch)


def test_an_error_of_the_pass_itself_is_not_hidden(case):
    sites = case.sites()
    batch = collate(altered(case, flip), torch.device("cpu"))
    with bound(case.model, sites), pytest.raises(ValueError, match="of the caller"), sites.batch(batch):
        with pytest.raises(GuidanceCorrupt), torch.no_grad():
            token_logprobs(case.model, batch)
        raise ValueError("of the caller")
