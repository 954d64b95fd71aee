"""Benchmark of the expert products: gate_up, SiLU times up, and down, grouped over the experts that tokens chose.

All arms of a batch come one after the other, so that a run that is cut short has compared what it measured. Beside the
default tiles many others are timed, of each projection by itself; that takes most of the time, and a quick run leaves
it out, together with the small kernels around the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracefp4.evaluation.bench import Bench, Work, failures, need_cuda
from tracefp4.evaluation.bench_kernels import random_values
from tracefp4.evaluation.expert_peers import PEERS, Layer
from tracefp4.evaluation.fill import fill_codes
from tracefp4.evaluation.peer_check import TOLERANCE, deviation
from tracefp4.formats.numerics import Numerics, get_numerics
from tracefp4.guidance.rounding import Rounding, round_gated, round_nearest

if TYPE_CHECKING:
    from tracefp4.kernels.experts import Config, ExpertWeight
    from tracefp4.kernels.routing import Route

EXPERTS = {"30b": (128, 8, 2048, 768), "35b": (256, 8, 2048, 512), "smollm2-moe": (8, 2, 576, 1536)}
"""Experts, those of a token, hidden size, intermediate size."""
EXPERT_BATCHES = {"smollm2-moe": (512,)}
"""Batches of a shape, where they are not those of decoding a large model."""
OWN = ("bf16", "fp4 nvfp4 w4a4", "fp4 nvfp4 w4a16", "fp4 mxfp4 w4a4", "fp4 mxfp4 w4a16")
"""Formats of weights and activations."""
ARMS = (*OWN, *PEERS)
"""Ours, and those of other libraries where they are installed."""
FOREIGN = (ImportError, AttributeError, OSError)
"""What other versions of other libraries may raise, beside what ours do."""
SETS = 3
"""Layers that are walked over, so that none is found in the cache."""


def bench_experts(
    bench: Bench, shapes: tuple[str, ...] = tuple(EXPERTS), batches: tuple[int, ...] = (), skew: float = 0.0,
    arms: tuple[str, ...] = ARMS, *, quick: bool = False,
) -> None:  # fmt: skip
    """The pair gate_up, SiLU times up, down; without routing and the weighted sum, which are measured by themselves.

    Args:
        bench: on a CUDA device.
        shapes: of :data:`EXPERTS`.
        batches: tokens; by default 1 to 256, or those of the shape.
        skew: see :func:`draw_experts`.
        arms: of :data:`ARMS`.
        quick: the pair with default tiles, and nothing else.

    Raises:
        ConfigError: the device is no GPU.
    """
    from tracefp4.kernels.experts import tile_rows

    need_cuda(bench, "experts")
    own = tuple(arm for arm in arms if arm in OWN)
    for shape in shapes:
        layers = {arm: [_expert_layer(bench, shape, arm) for _ in range(SETS)] for arm in own}
        peers = {arm: _peer_layers(bench, shape, arm) for arm in arms if arm in PEERS}
        for batch in batches or EXPERT_BATCHES.get(shape, (1, 8, 16, 64, 256)):
            chosen = draw_experts(batch, *EXPERTS[shape][:2], skew, bench.device)
            usual = tile_rows(chosen.numel(), EXPERTS[shape][0])
            label = f"{shape} B{batch}" + f" skew {skew:g}" * bool(skew)
            for rows in dict.fromkeys((usual, 128 if usual >= 64 and not quick else usual)):
                for arm in own:
                    case = _Case(bench, shape, arm, chosen, rows, label + f" rows {rows}" * (rows != usual))
                    case.pair(layers[arm], quick)
                    if not quick:
                        case.parts()
            for arm, made in peers.items():
                _peer_pair(bench, shape, arm, made, chosen, f"experts {label}")


def draw_experts(batch: int, experts: int, top_k: int, skew: float, device: torch.device) -> Tensor:
    """Experts ``(batch, top_k)`` int64 of random tokens, different ones for each.

    Uniform routing is the kindest: an expert that many tokens choose takes tiles of its own, and the rest of the GPU
    waits for it. With a ``skew`` the expert of rank ``r`` is wanted as ``1 / r^skew``, ranks in random order (Zipf's
    law at 1), without putting one back that a token has chosen.
    """
    generator = torch.Generator(device=device).manual_seed(batch)
    logits = torch.rand(batch, experts, generator=generator, device=device)
    if skew:
        rank = 1 + torch.randperm(experts, generator=generator, device=device)
        # The largest sums of logarithms of weights and Gumbel noise are a draw by weights.
        logits = -(-logits.clamp_min(1e-30).log()).clamp_min(1e-30).log() - skew * rank.log()
    return logits.topk(top_k, -1)[1]


def pair_flops(shape: str, batch: int) -> float:
    """Operations of both products of ``batch`` tokens."""
    _, top_k, hidden, inter = EXPERTS[shape]
    return 2.0 * batch * top_k * 3 * hidden * inter


def _expert_layer(bench: Bench, shape: str, arm: str) -> tuple:
    from tracefp4.kernels.experts import ExpertWeight

    experts, _, hidden, inter = EXPERTS[shape]
    made = []
    for out, inner in ((2 * inter, hidden), (hidden, inter)):
        if arm == "bf16":
            values = torch.randn(experts, out, inner, device=bench.device, dtype=torch.bfloat16) * 0.02
            made.append(ExpertWeight(values, None, None, out, inner))
            continue
        mx = "mxfp4" in arm
        words = torch.empty(experts, inner // 64, out, 16, dtype=torch.int16, device=bench.device)
        scales = torch.empty(experts, inner // 64, out, 2 if mx else 4, dtype=torch.uint8, device=bench.device)
        fill_codes(words, scales, mx)
        alpha = torch.rand(experts, device=bench.device) * 1e-3
        made.append(ExpertWeight(words, scales, alpha, out, inner, mx, 32 if mx else 16))
    return tuple(made)


def _peer_layers(bench: Bench, shape: str, arm: str) -> list[Layer]:
    """Layers of another library; none if it is missing, which is noted, or cannot make them, which is a failure."""
    peer, (experts, _, hidden, inter) = PEERS[arm], EXPERTS[shape]
    if peer.missing is not None:
        bench.note(f"{arm} was left out: {peer.missing}")
        return []
    try:
        return [peer.make(experts, hidden, inter, bench.device) for _ in range(SETS)]
    except (*failures(), *FOREIGN) as error:
        bench.fail(f"experts {shape}", arm, error)
        return []


def _peer_pair(bench: Bench, shape: str, arm: str, layers: list[Layer], chosen: Tensor, name: str) -> None:
    """The pair as another library computes it, and how far it is from the same sums in float64."""
    if not layers:
        return
    _, _, hidden, inter = EXPERTS[shape]
    x = random_values(bench, len(chosen), hidden)
    try:
        ways = [layer.works(chosen, x) for layer in layers]
    except (*failures(), *FOREIGN) as error:
        bench.fail(name, arm, error)
        return
    names, numbers = {}, {}
    for way in ways[0]:
        try:
            off = deviation(way.work(), layers[0].expected(x, way))
        except (*failures(), *FOREIGN) as error:
            bench.fail(f"{name}, check of {way.name}", arm, error)
            continue
        numbers[f"deviation {way.name}"] = off
        names[way.name] = f"{way.name}, {'deviates' if off > TOLERANCE else 'off'} by {off:.2%}"
    cases = [(names.get(way[0].name, way[0].name), [one.work for one in way]) for way in zip(*ways, strict=True)]
    nbytes = chosen.unique().numel() * 3 * hidden * inter * PEERS[arm].bits / 8
    bench.best(name, arm, cases, nbytes, pair_flops(shape, len(chosen)), numbers)


@dataclass(slots=True)
class _Case:
    """One arm of one batch."""

    bench: Bench
    shape: str
    arm: str
    chosen: Tensor
    """``(batch, top_k)``."""
    rows: int
    """Of a tile."""
    label: str

    @property
    def name(self) -> str:
        """In the table."""
        return f"experts {self.label}"

    @property
    def numerics(self) -> Numerics | None:
        """Of activations."""
        if "w4a4" not in self.arm:
            return None
        return get_numerics("mxfp4-ceil" if "mxfp4" in self.arm else "nvfp4-te")

    def pair(self, layers: list[tuple], quick: bool) -> None:
        """Both projections with default tiles; unless ``quick`` also with the best of each by itself."""
        from tracefp4.kernels.routing import route

        experts, top_k, hidden, inter = EXPERTS[self.shape]
        batch, n, bench = len(self.chosen), self.numerics, self.bench
        pairs = route(self.chosen, experts, self.rows)
        x, gated = random_values(bench, batch, hidden), random_values(bench, batch * top_k, inter, 1)
        nbytes = self.chosen.unique().numel() / experts * sum(_nbytes(w) for w in layers[0])
        flops = pair_flops(self.shape, batch)
        choices: list[tuple[str, Sequence[Config | None]]] = [("default tiles", [None, None])]
        if not quick:
            best = [
                _best_tile(
                    bench, f"{self.name} {('gate_up', 'down')[p]}", self.arm, [layer[p] for layer in layers], v, pairs,
                    p, n, expert_configs(self.arm, batch, self.rows, v.shape[1]),
                )
                for p, v in enumerate((x, gated))
            ]  # fmt: skip
            choices.append(("best tiles", best))
        cases: list[tuple[str, list[Work]]] = [
            (text, [lambda w=layer, c=c: _pair(x, w, pairs, n, c) for layer in layers]) for text, c in choices
        ]
        if quick:
            bench.add(self.name, self.arm, cases[0][1], nbytes, cases[0][0], flops)
        else:
            bench.best(self.name, self.arm, cases, nbytes, flops)

    def parts(self) -> None:
        """The small kernels around the products."""
        from tracefp4.kernels.choice import choose
        from tracefp4.kernels.experts import weighted_sum
        from tracefp4.kernels.routing import route

        experts, top_k, hidden, inter = EXPERTS[self.shape]
        batch, n, bench, chosen = len(self.chosen), self.numerics, self.bench, self.chosen
        if n is not None:
            x, up = random_values(bench, batch, hidden), random_values(bench, batch * top_k, 2 * inter, 2)
            bench.add(f"{self.name} round x", self.arm, [lambda: round_nearest(x, n)], None)
            bench.add(f"{self.name} gate and round", self.arm, [lambda: round_gated(up, n)], None)
        if self.arm != "bf16":
            return
        logits = torch.rand(batch, experts, device=bench.device)
        kept, slots = chosen.to(torch.uint8), torch.arange(batch, device=bench.device)
        choice: Work = lambda: choose(  # noqa: E731
            logits, top_k, renormalise=True, dtype=torch.bfloat16, routes=kept, slots=slots
        )
        bench.add(f"choice {self.label}", "bf16", [choice], None)
        bench.add(f"route {self.label}", "bf16", [lambda: route(chosen, experts, self.rows)], None)
        out = torch.zeros(batch * top_k, hidden, device=bench.device, dtype=torch.bfloat16)
        gates = torch.rand(chosen.shape).to(out)
        bench.add(f"weighted sum {self.label}", "bf16", [lambda: weighted_sum(out, gates)], out.nbytes)


def _pair(
    x: Tensor, layer: tuple, pairs: Route, n: Numerics | None, configs: Sequence[Config | None]
) -> Tensor:  # fmt: skip
    """Both projections of ``x (batch, hidden)``, its rounding and that of the gated values between them included."""
    from tracefp4.kernels.experts import grouped_linear
    from tracefp4.kernels.gate import gate

    value, scale = (x, None) if n is None else _operand(round_nearest(x, n))
    up = grouped_linear(value, scale, layer[0], pairs, per_token=True, config=configs[0])
    fused = None if n is None else round_gated(up, n)
    if fused is None:
        value, scale = gate(up), None
    else:
        value, scale = _operand(fused)
    return grouped_linear(value, scale, layer[1], pairs, per_token=False, config=configs[1])


def _best_tile(
    bench: Bench, name: str, arm: str, weights: list[ExpertWeight], value: Tensor, pairs: Route, part: int,
    numerics: Numerics | None, configs: list[Config],
) -> Config | None:  # fmt: skip
    """One projection by itself. Tiles differ in speed alone, so the best of each projection make the best pair."""
    from tracefp4.kernels.experts import grouped_linear

    scale = None if numerics is None else torch.ones(value.shape[0], 1, device=value.device)
    used = pairs.tiles[pairs.tiles[:, 2] > pairs.tiles[:, 1]]
    hit = used[:, 0].unique().numel() / weights[0].values.shape[0]
    cases: dict[str, Config | None] = {_text(config): config for config in (None, *configs)}
    works: list[tuple[str, list[Work]]] = [
        (
            text,
            [lambda w=w, c=c: grouped_linear(value, scale, w, pairs, per_token=part == 0, config=c) for w in weights],
        )
        for text, c in cases.items()
    ]
    return cases[bench.best(name, arm, works, hit * _nbytes(weights[0])) or "default"]


def _nbytes(weight: ExpertWeight) -> int:
    return weight.values.nbytes + (0 if weight.scales is None else weight.scales.nbytes)


def _operand(rounded: Rounding) -> tuple[Tensor, Tensor | None]:
    return rounded.factor(), rounded.decode_scale()


def _text(config: Config | None) -> str:
    if config is None:
        return "default"
    limit = "" if config.registers is None else f" registers {config.registers}"
    return f"columns {config.columns} unroll {config.unroll} warps {config.warps} stages {config.stages}{limit}"


def expert_configs(arm: str, batch: int, rows: int, inner: int) -> list[Config]:
    """Tiles worth measuring beside the default; ``benchmarks/instructions.py`` counts what each costs.

    Args:
        arm: of :data:`OWN`.
        batch: tokens.
        rows: pairs of a tile.
        inner: columns of a matrix.
    """
    from tracefp4.kernels.experts import Config

    sizes: list[tuple[int, ...]]
    if rows >= 32:
        sizes = [(128, 1, 4, 4), (128, 1, 4, 3), (64, 1, 4, 4), (64, 1, 4, 3), (128, 1, 8, 3)]
        # Few experts make few programs, and what a program has under way is then all that is.
        sizes += [(64, 1, 4, 6), (64, 1, 4, 8), (128, 1, 4, 6)]
        if arm != "bf16":
            sizes += [(128, 2, 4, 3), (64, 2, 4, 3), (128, 1, 2, 3), (256, 1, 4, 3)]
            sizes.append((128, 1, 4, 3, 128))  # four programs a multiprocessor instead of three
    elif arm == "bf16":
        sizes = [(16, 4, 1, 4), (32, 4, 1, 3)] if batch <= 4 else [(128, 1, 4, 4), (64, 1, 2, 4), (64, 2, 4, 4)]
    elif batch <= 4:
        # One token has few programs, and each waits for its loads: what counts is how many are under way.
        sizes = [(16, 4, 1, 4), (16, 2, 1, 6), (32, 1, 1, 10), (64, 2, 1, 6)]
        sizes += [(32, 2, 1, stages) for stages in (4, 6, 8)]
    elif "nvfp4 w4a4" in arm:
        sizes = [
            (64, 1, 1, 3), (64, 1, 1, 4), (64, 2, 1, 3), (64, 4, 1, 2), (32, 4, 1, 2), (32, 2, 1, 4),
            (128, 1, 2, 4), (128, 1, 1, 4), (256, 1, 4, 3), (128, 2, 4, 3),
        ]  # fmt: skip
    else:
        sizes = [(64, 1, 1, 4), (64, 2, 1, 3), (32, 4, 1, 2), (128, 1, 2, 4), (128, 2, 4, 3)]
    # A step takes whole chunks of a row.
    return [Config(*size) for size in sizes if inner % (64 * size[1]) == 0]
