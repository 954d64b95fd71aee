"""The decoder as graphs: static tensors, padding and renewed weights give the gradients of the step-by-step pass.

Without a GPU a captured function is run again in the place of a replay, which tests everything but CUDA's own part.
"""

from dataclasses import replace

import pytest
import torch

from tracefp4.errors import TrainingError
from tracefp4.evaluation.bench_train import FULL, SHAPES, Case
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import restrict
from tracefp4.models.binding import bound
from tracefp4.training.batch import collate, plan_micro_batches
from tracefp4.training.graphs import KEPT, DecoderGraphs, padded_width, refusal
from tracefp4.training.observe import Observer
from tracefp4.training.policy import score_tokens
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import WeightOperands

SHAPE = replace(
    SHAPES["tiny"], layers=2, hidden=64, heads=2, kv_heads=1, head_dim=64, experts=4, inter=64, vocabulary=96
)


@pytest.fixture(scope="module")
def case():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    made = Case.make(SHAPE, 3, 40, device, recompute=False)
    made.prepare(["fp4 guided"])
    made.micro_batches = [made.following(group, FULL) for group in made.micro_batches]
    return made


@pytest.fixture
def capture(case, rerun):
    return None if case.device.type == "cuda" else rerun


def _cut(example, rows):
    """The first rows of an example, with their guidance."""
    record = example.record
    sites = {site: one.slice(0, rows, checks=False) for site, one in record.sites.items()}
    record = replace(record, rows=rows, valid=record.valid[:rows], sites=sites)
    return replace(example, tokens=example.tokens[: rows + 1], record=record, routes=example.routes[:rows])


def _without(example, layer):
    """An example whose record has no sites of a layer."""
    sites = {site: one for site, one in example.record.sites.items() if site.layer != layer}
    return replace(example, record=replace(example.record, sites=sites))


def _gradients(case, sites, batch, graphs):
    case.model.zero_grad(set_to_none=True)
    with sites.batch(batch):
        scored = score_tokens(case.model, batch, graphs=graphs)
        (-scored.logprobs.sum()).backward()
    return scored.logprobs.detach().clone(), {n: p.grad.clone() for n, p in case.model.named_parameters()}


def _same(found, expected):
    assert torch.allclose(found[0], expected[0], atol=2e-2)
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).norm() <= 8e-2 * grad.norm() + 1e-4, name


@pytest.mark.parametrize("arm", ["bf16", "qat", "guided", "partly guided", "guided, a layer in bf16"])
def test_gradients_of_the_step_by_step_pass(case, capture, arm):
    spec = get_spec("bf16" if arm == "bf16" else "nvfp4-w4a4-kv4" + "/b1" * ("a layer" in arm))
    sites = TrainerSites(case.layout, spec)
    first, second = case.micro_batches
    lengths = (40, 33, 21)
    batches = [[_cut(e, n) for e, n in zip(group, lengths, strict=True)] for group in (first, second)]
    batches.append(batches[1][:2])
    if "guided" not in arm:
        batches = [[replace(e, record=None) for e in group] for group in batches]
    elif "a layer" in arm:
        batches = [[_without(example, 0) for example in group] for group in batches]
    elif arm == "partly guided":
        batches = [[replace(group[0], record=None), *group[1:]] for group in batches]
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, capture)
        for group in batches:
            batch = collate(group, case.device)
            _same(_gradients(case, sites, batch, graphs), _gradients(case, sites, batch, None))
        assert graphs.failure is None and len(graphs) == 1
        # Weights change: operands are made anew where the graphs read them, at first step by step, then by a graph.
        batch, changed = collate(batches[0], case.device), []
        for factor in (1.25, 1.2, 1 / 1.5):
            with torch.no_grad():
                for p in case.model.parameters():
                    p.mul_(factor)
            changed.append(_gradients(case, sites, batch, graphs))
            _same(changed[-1], _gradients(case, sites, batch, None))
        assert len(graphs) == 1 and not sites.weights.stale()
        kept = {key: operand.values.clone() for key, (_, operand) in sites.weights._operands.items()}
        fresh = TrainerSites(case.layout, spec)
    with bound(case.model, fresh):
        _same(changed[-1], _gradients(case, fresh, batch, None))
        assert all(torch.equal(kept[key], operand.values) for key, (_, operand) in fresh.weights._operands.items())


def test_operands_are_renewed_by_what_was_captured(case, rerun):
    sites = TrainerSites(case.layout, get_spec("nvfp4-w4a4-kv4"))
    batch, replays = collate(case.micro_batches[0], case.device), []

    def counting(bodies):
        def counted(replay):
            return lambda: (replays.append(len(bodies)), replay())[1]

        return [(results, counted(replay)) for results, replay in rerun(bodies)]

    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, counting)
        for _ in range(4):
            with torch.no_grad():
                case.model.get_decoder().layers[1].mlp.experts.down_proj.add_(0.0)
            _gradients(case, sites, batch, graphs)
    # A pair of passes is captured, later the operands; the last two changes of weights repeat what was captured then.
    assert replays.count(1) == 2 and replays.count(2) == 8 and graphs.failure is None


def test_a_batch_is_the_same_whatever_ran_before(case, capture):
    sites = TrainerSites(case.layout, get_spec("nvfp4-w4a4-kv4"))
    a, b = (
        collate([_cut(e, 30) for e in group[:n]], case.device)
        for group, n in zip(case.micro_batches, (2, 3), strict=True)
    )
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, capture)
        one = _gradients(case, sites, a, graphs)
        _gradients(case, sites, b, graphs)
        other = _gradients(case, sites, a, graphs)
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(grad, other[1][name]) for name, grad in one[1].items())


def test_congruent_scales_are_checked_in_each_replay(case, capture):
    sites = TrainerSites(case.layout, get_spec("nvfp4-w4a4-kv4"))
    example = case.micro_batches[0][0]
    record = example.record
    congruent = {site: one.reduce(1, 2, record.valid) for site, one in record.sites.items()}
    batch = collate([replace(example, record=replace(record, sites=congruent))], case.device)
    shares = []
    with bound(case.model, sites):
        for graphs in (None, DecoderGraphs(case.model, sites, 256, capture)):
            for _ in range(2):
                _gradients(case, sites, batch, graphs)
                shares.append((sites.checks.total().tolist()[0], sites.checks.take()))
    assert shares[0] == shares[1] == shares[2] == shares[3] and shares[0][0] > 0


def test_what_has_to_run_step_by_step(case, capture):
    sites = TrainerSites(case.layout, get_spec("nvfp4-w4a4-kv4"))
    batch = collate(case.micro_batches[0], case.device)
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, capture)
        with sites.batch(batch), torch.no_grad():
            assert graphs.hidden(batch.input_ids, batch.real) is None
        with sites.batch(batch, observer=Observer()):
            assert graphs.hidden(batch.input_ids, batch.real) is None
        small = DecoderGraphs(case.model, sites, 64, capture)
        with sites.batch(batch):
            assert small.hidden(batch.input_ids, batch.real) is None


def test_a_second_forward_before_the_backward_is_refused(case, capture):
    sites = TrainerSites(case.layout, get_spec("bf16"))
    batch = collate(case.micro_batches[0], case.device)
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, capture)
        with sites.batch(batch):
            one, _ = (score_tokens(case.model, batch, graphs=graphs).logprobs for _ in range(2))
            with pytest.raises(TrainingError, match="before the backward pass"):
                one.sum().backward()


def test_a_failed_capture_is_told_and_training_goes_on(case):
    def broken(bodies):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    sites = TrainerSites(case.layout, get_spec("bf16"))
    batch = collate(case.micro_batches[0], case.device)
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, broken)
        with pytest.warns(RuntimeWarning, match="without CUDA graphs: operation not permitted"):
            found = _gradients(case, sites, batch, graphs)
        _same(found, _gradients(case, sites, batch, None))
    assert graphs.failure == "operation not permitted when stream is capturing"


def test_a_checked_plan_is_settled_first(case, capture):
    layout, sites = case.layout, TrainerSites(case.layout, get_spec("nvfp4-w4a4-kv4"))
    shapes = layout.site_shapes(get_spec("nvfp4-w4a4-kv4"))
    found, counted = [], []
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, capture)
        for plan in ("r1-all+mid/s2", "c1-all+mid/s2"):
            group = [
                replace(e, record=restrict(e.record, Plan.parse(plan), shapes, layout.num_layers))
                for e in case.micro_batches[0]
            ]
            batch = collate(group, case.device)
            for _ in range(2):
                found.append(_gradients(case, sites, batch, graphs))
                counted.append((sites.checks.total().tolist(), sites.pulled.take()))
                sites.checks.take()
    assert len(graphs) == 1 and graphs.failure is None
    # Guided by the same bits, in the same graphs. The second pass over a micro-batch has nothing left to find.
    for logprobs, gradients in found[1:]:
        assert torch.equal(logprobs, found[0][0])
        assert all(torch.equal(grad, found[0][1][name]) for name, grad in gradients.items())
    assert all(checks == counted[0][0] for checks, _ in counted)
    assert [pulled is None for _, pulled in counted] == [True, True, False, True]


def test_bits_that_an_observer_found_are_not_looked_for_again(case, capture):
    layout, sites = case.layout, TrainerSites(case.layout, get_spec("nvfp4-w4a4-kv4"))
    shapes, example = layout.site_shapes(get_spec("nvfp4-w4a4-kv4")), case.micro_batches[0][0]
    example = replace(example, record=restrict(example.record, Plan.parse("c1-all+mid/s2"), shapes, layout.num_layers))
    seen, found = [], []
    hook = case.model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 256, capture)
        for observed in (True, False):
            batch = collate([example], case.device)
            if observed:
                with sites.batch(batch, observer=Observer()), torch.no_grad():
                    score_tokens(case.model, batch)
            found.append((_gradients(case, sites, batch, graphs)[0], seen.count(False)))
            seen.clear()
    hook.remove()
    assert torch.equal(found[0][0], found[1][0]) and [searches for _, searches in found] == [1, 1]


def test_few_programs_are_kept(case, capture):
    sites = TrainerSites(case.layout, get_spec("bf16"))
    with bound(case.model, sites):
        graphs = DecoderGraphs(case.model, sites, 1024, capture)
        for rows in range(32, 32 * (KEPT + 3), 32):
            example = replace(case.micro_batches[0][0], record=None, routes=None)
            batch = collate([replace(example, tokens=tuple([5] * (rows + 1)))], case.device)
            _gradients(case, sites, batch, graphs)
        assert len(graphs) == KEPT


def test_who_is_refused(case):
    sites = TrainerSites(case.layout, get_spec("nvfp4-w4a4"))
    if case.device.type == "cpu":
        assert "is on cpu" in refusal(case.model, sites)
        with pytest.raises(TrainingError, match="the model is on cpu"):
            DecoderGraphs(case.model, sites, 256)
    spec = get_spec("nvfp4-w4a4")
    packed = TrainerSites(case.layout, spec, weights=WeightOperands(spec.weights, "packed"))
    assert "packed weights" in refusal(case.model, packed, cuda=False)


def test_widths_are_few_and_waste_little():
    widths = [padded_width(rows) for rows in range(1, 5000)]
    assert all(width >= rows for rows, width in enumerate(widths, 1)) and widths == sorted(widths)
    assert all(width <= 1.25 * rows for rows, width in enumerate(widths, 1) if rows > 128)
    assert len(set(widths)) < 60


def test_micro_batches_hold_padded_rows(case):
    examples = [_cut(e, 33) for e in case.micro_batches[0]]
    assert [len(g) for g in plan_micro_batches(examples, 128)] == [3]
    assert [len(g) for g in plan_micro_batches(examples, 128, padded_width)] == [2, 1]
