"""Benchmark of a training step: bfloat16, quantization-aware, and guided.

A step is what :class:`~tracefp4.rl.update.Updater` does with its micro-batches, without rewards and metrics: collate
(which stages guidance from the host), forward, log-probs, backward, gradients added in FP32; after the last micro-batch
AdamW. Weights are random and so are tokens and routes, the same in all arms; guidance is what the model itself would
have recorded, held as decoded frames. The checked arm follows a model whose weights differ by a thousandth, so that
some checks fail and bits are pulled; its line says how many. ``transformers`` is the same step of the model as
transformers runs it, with its grouped products: the bfloat16 arm must not be slower than that.

The bound is not from bytes alone: ``flops / (rate of a large bfloat16 product in this run) + bytes / bandwidth``, with
the bytes of weights, gradients and optimizer, which no product hides, and none of activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tracefp4.config import OptimizerConfig
from tracefp4.core import Site, SiteShape
from tracefp4.evaluation.bench import Bench, Row, failures, wait_for
from tracefp4.evaluation.bench_shapes import Shape as ModelShape
from tracefp4.evaluation.bench_shapes import random_model
from tracefp4.formats.blocks import Quantized
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.blocks import BLOCKS
from tracefp4.guidance.frame import Expectation, decode, encode
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import Record, SiteRecord, restrict, token_hash
from tracefp4.guidance.runs import SiteRuns
from tracefp4.models.binding import bound
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.training.ahead import ahead
from tracefp4.training.batch import Example, MicroBatch, collate
from tracefp4.training.graphs import DecoderGraphs, refusal
from tracefp4.training.observe import Observer
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.policy import recompute_layers, score_tokens
from tracefp4.training.pulls import PullCounts
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import Cache, WeightOperands


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture-of-experts model to train; the defaults are a slice of Qwen3-30B-A3B's."""

    layers: int = 4
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    inter: int = 768
    vocabulary: int = 12672

    def config(self) -> Any:
        """The configuration of a Qwen3-MoE model of these sizes."""
        fields = {
            "hidden_size": self.hidden, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "num_experts": self.experts, "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.inter, "intermediate_size": self.inter, "vocab_size": self.vocabulary,
            "max_position_embeddings": 65536,
        }  # fmt: skip
        return ModelShape("qwen3_moe", self.layers, self.layers, fields).config(self.layers)


SHAPES: dict[str, Shape] = {
    "smollm2-moe": Shape(30, 576, 9, 3, 64, 8, 2, 1536, 49152),
    "30b-slice": Shape(),
    "tiny": Shape(2, 256, 4, 2, 64, 8, 2, 512, 1024),
}
"""By name; the slice has a twelfth of the layers of Qwen3-30B-A3B and of its vocabulary."""
SIZES: dict[str, tuple[int, int]] = {"smollm2-moe": (32, 1024), "30b-slice": (16, 1024), "tiny": (8, 128)}
"""Sequences of a micro-batch and their rows."""
MICRO_BATCHES = 2
SPEC = "nvfp4-w4a4-kv4"
FULL = "r1-all+mid/s8"
"""What is recorded; other plans are cut from it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How one arm trains."""

    spec: str = SPEC
    plan: str = ""
    """Guidance that it follows, if any; a checked plan pulls bits where a check fails."""
    cache: Cache = "widened"
    bound: bool = True
    """Through our site objects; else as transformers has it."""


ARMS: dict[str, Arm] = {
    "bf16": Arm("bf16"),
    "transformers": Arm("bf16", bound=False),
    "fp4 qat": Arm(),
    "fp4 guided": Arm(plan=FULL),
    "fp4 guided s2": Arm(plan="r1-all+mid/s2"),
    "fp4 checked": Arm(plan="c1-all+mid/s8"),
    "fp4 guided, packed weights": Arm(plan=FULL, cache="packed"),
}
"""By name."""
NOISE = 1e-3
"""Relative difference of the weights that a checked arm is guided by."""


@dataclass(slots=True)
class Recorder(Observer):
    """Keeps what a forward pass rounds, as one bit a code and whole scales."""

    shapes: dict[Site, SiteShape]
    sites: dict[Site, SiteRecord] = field(default_factory=dict)
    truth: Any = None

    def see(self, site: Site, x: Tensor, result: Quantized, numerics: Numerics, rows: Tensor | None) -> None:
        """Pack one rounding; see :meth:`tracefp4.training.observe.Observer.see`."""
        shape = self.shapes[site]
        parts = [result.codes, result.scales, result.global_scale if shape.token_scale else None]
        if rows is not None:
            order = torch.argsort(rows)
            parts = [None if part is None else part[order] for part in parts]
        codes, scales, scale = (None if p is None else p.reshape(-1, shape.vectors, p.shape[-1]).cpu() for p in parts)
        if codes is not None and scales is not None:
            self.sites[site] = SiteRecord.pack(shape, codes, scales, None if scale is None else scale.squeeze(-1), 1)


@dataclass(slots=True)
class Case:
    """A model, its optimizer, and micro-batches of examples."""

    model: Any
    layout: ModelLayout
    optimizer: MasterAdamW
    micro_batches: list[list[Example]]
    device: torch.device
    recompute: bool = False
    """Layers are recomputed in the backward pass."""
    guidance: dict[str, dict[int, Record]] = field(default_factory=dict)
    """What to follow, by plan and example."""
    pulled: PullCounts | None = None
    """What the last step pulled."""

    @property
    def tokens(self) -> int:
        """Rows of a micro-batch."""
        return sum(example.rows for example in self.micro_batches[0])

    @classmethod
    def make(cls, shape: Shape, sequences: int, rows: int, device: torch.device, *, recompute: bool = True) -> Case:
        """Random weights, tokens and routes; layers are recomputed in the backward pass unless said otherwise."""
        model = random_model(shape.config(), device)
        if recompute:
            recompute_layers(model)
        model.train()
        generator = torch.Generator().manual_seed(0)
        examples = []
        for index in range(MICRO_BATCHES * sequences):
            tokens = torch.randint(0, shape.vocabulary, (rows + 1,), generator=generator).tolist()
            routes = torch.rand(rows, shape.layers, shape.experts, generator=generator).topk(shape.top_k, -1)[1]
            examples.append(Example(tuple(tokens), 1, index=index, routes=routes.to(torch.int16)))
        groups = [examples[i * sequences : (i + 1) * sequences] for i in range(MICRO_BATCHES)]
        optimizer = MasterAdamW(model.named_parameters(), OptimizerConfig(lr=1e-7))
        return cls(model, describe(model), optimizer, groups, device, recompute)

    def prepare(self, arms: Iterable[str]) -> None:
        """Record what these arms follow: what the model rounds, or for checked plans a slightly different one."""
        plans = [Plan.parse(plan) for plan in dict.fromkeys(ARMS[name].plan for name in arms) if plan]
        self._record([plan for plan in plans if not plan.checked])
        checked = [plan for plan in plans if plan.checked]
        if checked:
            params = list(self.model.parameters())
            own = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p in params:
                    p.mul_(1.0 + NOISE * torch.randn_like(p, dtype=torch.float32))
                self._record(checked)
                for p, kept in zip(params, own, strict=True):
                    p.copy_(kept)

    def _record(self, plans: Sequence[Plan]) -> None:
        """Record one forward pass of every example, a sequence at a time, and cut these plans from it."""
        shapes = self.layout.site_shapes(get_spec(SPEC))
        for example, record in self._records() if plans else ():
            for plan in plans:
                cut = restrict(record, plan, shapes, self.layout.num_layers)
                kept = replace(self._through_a_frame(cut), source=cut.source)
                self.guidance.setdefault(str(plan), {})[example.index] = kept

    def _records(self) -> Iterator[tuple[Example, Record]]:
        spec = get_spec(SPEC)
        sites = TrainerSites(self.layout, spec)
        with bound(self.model, sites), torch.no_grad():
            for group in self.micro_batches:
                for example in group:
                    recorder, batch = Recorder(sites.shapes), collate([example], self.device)
                    with sites.batch(batch, observer=recorder):
                        score_tokens(self.model, batch)
                    valid = torch.ones(example.rows, dtype=torch.bool)
                    yield (
                        example,
                        Record(
                            FULL,
                            token_hash(example.tokens),
                            spec.hash,
                            0,
                            example.rows,
                            valid,
                            SiteRuns.of(recorder.sites),
                        ),
                    )

    @staticmethod
    def _through_a_frame(record: Record) -> Record:
        """As a trainer has it: decoded, in the memory of frames."""
        frame = encode(record)
        memory = BLOCKS.take(len(frame))
        memory[:] = frame
        return decode(memory.toreadonly(), Expectation(shapes=tuple(part.shape for part in record.sites.values())))

    @contextmanager
    def step(self, arm: Arm) -> Iterator[Callable[[], None]]:
        """One optimizer step of an arm, to be called often."""
        total = sum(example.rows for group in self.micro_batches for example in group)
        if not arm.bound:
            yield lambda: self._run(None, None, arm, total)
            return
        spec = get_spec(arm.spec)
        sites = TrainerSites(self.layout, spec, weights=WeightOperands(spec.weights, arm.cache))
        with bound(self.model, sites):
            possible = not self.recompute and refusal(self.model, sites) is None
            graphs = DecoderGraphs(self.model, sites, self.tokens) if possible else None
            yield lambda: self._run(sites, graphs, arm, total)

    def _run(self, sites: TrainerSites | None, graphs: DecoderGraphs | None, arm: Arm, total: int) -> None:
        if graphs is not None:
            graphs.renew()
        for batch in ahead((partial(self.collate, group, arm) for group in self.micro_batches), self.device):
            if sites is None:
                (-score_tokens(self.model, batch).logprobs.sum() / total).backward()
            else:
                with sites.batch(batch):
                    (-score_tokens(self.model, batch, graphs=graphs).logprobs.sum() / total).backward()
            self.optimizer.collect()
        self.optimizer.step()
        self.pulled = None if sites is None else sites.pulled.take()

    def collate(self, group: list[Example], arm: Arm) -> MicroBatch:
        """A micro-batch as the arm sees it: with guidance or without."""
        return collate(self.following(group, arm.plan), self.device)

    def following(self, group: list[Example], plan: str) -> list[Example]:
        """Examples with what they follow under a plan that was prepared; without guidance if it is empty."""
        records = self.guidance[plan] if plan else {}
        return [replace(example, record=records.get(example.index)) for example in group]


def bench_train(
    bench: Bench,
    shapes: tuple[str, ...] = ("smollm2-moe", "30b-slice"),
    arms: tuple[str, ...] = tuple(ARMS),
    sequences: int = 0,
    rows: int = 0,
    recompute: bool = False,
) -> None:
    """Optimizer steps of each arm, with the peak of memory.

    Args:
        bench: where rows go.
        shapes: names in :data:`SHAPES`.
        arms: names in :data:`ARMS`.
        sequences: of a micro-batch, and
        rows: of each of them; 0 takes the shape's own.
        recompute: layers are recomputed in the backward pass; else forward and backward run as CUDA graphs.
    """
    for name in shapes:
        shape = SHAPES[name]
        batch, length = (asked or own for asked, own in zip((sequences, rows), SIZES[name], strict=True))
        title = f"train {name} {MICRO_BATCHES}x{batch}x{length}"
        case = Case.make(shape, batch, length, bench.device, recompute=recompute)
        case.prepare(arms)
        flops = step_flops(shape, MICRO_BATCHES * batch * length, length, 4 if recompute else 3)
        nbytes = step_bytes(shape)
        bound_us = 1e6 * (flops / bench.product_rate + nbytes / bench.bandwidth)
        for arm in arms:
            try:
                with case.step(ARMS[arm]) as step:
                    seconds, peak = _measure(step, bench)
            except failures() as error:
                bench.fail(title, arm, error)
                continue
            detail = f"{flops / seconds / 1e12:.3g} TFLOP/s, peak {peak / 2**30:.3f} GiB"
            detail += "" if case.pulled is None else f", {case.pulled.share:.1%} pulled"
            bench.keep(Row(title, arm, 1e6 * seconds, "us", bound_us, detail=detail))
        del case


def step_flops(shape: Shape, tokens: int, rows: int, times: int = 4) -> float:
    """Floating-point operations of a step over ``tokens`` rows in sequences of ``rows``.

    A layer's products are made three times (forward, two gradients), four ``times`` if it is recomputed; those of the
    head always are.
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    scores = rows * shape.heads * shape.head_dim  # a query sees half of the rows, for K and for V
    experts = shape.top_k * 3 * shape.hidden * shape.inter + shape.hidden * shape.experts
    layers, head = shape.layers * (attention + scores + experts), shape.hidden * shape.vocabulary
    return 2.0 * tokens * (times * layers + 4 * head)


def step_bytes(shape: Shape) -> float:
    """Bytes of weights, gradients and optimizer of a step.

    A micro-batch reads each weight three times, writes its gradient and adds it up in FP32 (18 bytes a parameter).
    The optimizer reads gradients for the norm, and reads and writes masters and two moments (34 bytes).
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + shape.experts * (3 * shape.hidden * shape.inter + shape.hidden)
    parameters = shape.layers * layer + 2 * shape.hidden * shape.vocabulary
    return parameters * (18.0 * MICRO_BATCHES + 34.0)


def _measure(step: Callable[[], None], bench: Bench) -> tuple[float, int]:
    """Median seconds of a step, and the most bytes in use during one; on a CPU those of the whole process."""
    cuda, samples = bench.device.type == "cuda", []
    step()
    _reset_peak(cuda)
    for _ in range(min(bench.repeats, 5)):
        wait_for(bench.device)
        start = time.perf_counter()
        step()
        wait_for(bench.device)
        samples.append(time.perf_counter() - start)
    return median(samples), _peak(cuda)


def _reset_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # The peak is then that of the process so far.


def _peak(cuda: bool) -> int:
    if cuda:
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
