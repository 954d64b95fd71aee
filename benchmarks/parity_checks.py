"""How rarely a guided trainer needs the recorded bits, and what checks or syndromes in their place would cost.

    python benchmarks/parity_checks.py smollm2-moe --prompts 16 --new-tokens 64 --output checks.json

A trainer that was guided at every site before this one computes nearly the rollout's values, so that rounding to
nearest at the rollout's scale mostly gives the recorded codes already, and most recorded bits say what is known. Two
cheaper messages are tried on real rollouts, with a trainer that is guided by the true bits:

*check*     32 bits over the parities of a vector. Where the trainer's own parities pass it they are right (a wrong
            vector passes with probability 2^-32); where they fail, the vector's bits are pulled from the engine.
*syndrome*  of an extended Hamming code over 16, 32 or 64 parities (5, 6, 7 bits), decoded softly: of all sets of flips
            among the eight values nearest to a rounding boundary that explain the syndrome, the one that costs least,
            a flip costing its squared distance to the boundary in units of the value. Then the check and the pull.

Bits are given a block of 16 values and include two bits of its scale. Vectors of K and V of all heads of a token share
one check. Sites are counted in the order in which the trainer meets them; nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.core import KV_KINDS, Site
from tracefp4.evaluation.gap import score
from tracefp4.evaluation.measure import FULL_PLAN, MeasureSettings, _generate, _requests
from tracefp4.formats import e2m1
from tracefp4.formats.blocks import Quantized, normalize
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.record import restrict
from tracefp4.models.binding import bound
from tracefp4.models.layout import describe
from tracefp4.quantizers.guided import rollout_scales
from tracefp4.rl.policies import load_named
from tracefp4.training.observe import Observer
from tracefp4.training.sites import TrainerSites

LENGTHS = (16, 32, 64)
"""Parities of a code word."""
NEAREST = 8
"""Values of a code word that may flip."""
CHECK_BITS, SCALE_BITS = 32, 2


def decode(flips: Tensor, cost: Tensor, length: int) -> Tensor:
    """Which code words a syndrome would not restore.

    Args:
        flips: bool ``(V, D)``, the trainer's parities against the recorded ones.
        cost: float32 ``(V, D)`` of flipping each.
        length: parities of a code word, a power of two that divides ``D``.

    Returns:
        bool ``(V, D / length)``.
    """
    bits = length.bit_length() - 1
    column = (1 << bits) | torch.arange(length, device=flips.device)
    words, prices = flips.reshape(-1, length), cost.reshape(-1, length)
    syndrome = torch.zeros(len(words), dtype=torch.int64, device=flips.device)
    for i in range(length):
        syndrome ^= torch.where(words[:, i], column[i], 0)
    wrong = words.any(1)  # as long as nothing is decoded
    subsets = torch.arange(1 << NEAREST, device=flips.device)[:, None] >> torch.arange(NEAREST, device=flips.device) & 1
    for part in (syndrome != 0).nonzero().flatten().split(1 << 14):
        price, place = prices[part].topk(NEAREST, dim=1, largest=False)
        explained = torch.zeros(len(part), len(subsets), dtype=torch.int64, device=flips.device)
        for k in range(NEAREST):
            explained ^= subsets[:, k] * column[place[:, k : k + 1]]
        total = (price @ subsets.T.to(price.dtype)).masked_fill(explained != syndrome[part][:, None], torch.inf)
        found, best = total.min(1)
        guess = torch.zeros_like(words[part]).scatter_(1, place, subsets[best].bool())
        wrong[part] = (guess != words[part]).any(1) | found.isinf()
    return wrong.view(len(flips), -1)


class Parities(Observer):
    """Counts vectors whose parities the trainer would get wrong: ``{kind: {what: count}}``, and by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, defaultdict[str, float]] = {}
        self.layers: dict[str, dict[int, list[float]]] = {}

    def see(self, site: Site, x: Tensor, result: Quantized, numerics: Numerics, rows: Tensor | None) -> None:
        """See :meth:`Observer.see`; the truth holds whole codes."""
        truth = self.truth
        recorded = truth.sites.get(site) if truth is not None else None
        if truth is None or recorded is None:
            return
        outcome, mask = recorded.outcome(rows), truth.vectors(recorded.shape, rows)
        z = normalize(x, rollout_scales(x, outcome, numerics), outcome.global_scale, numerics)[mask]
        flips = ((e2m1.encode(z) ^ outcome.low[mask]) & 1).bool()
        size = z.abs()
        grid = torch.tensor(e2m1.MAGNITUDES, device=z.device)
        distance = (size[..., None] - (grid[1:] + grid[:-1]) / 2).abs().amin(-1)
        cost = (distance / (size + 0.02)) ** 2
        heads = recorded.shape.vectors if site.kind in KV_KINDS else 1
        message = flips.view(-1, heads * flips.shape[1])
        counts = self.found.setdefault(str(site.kind), defaultdict(float))
        counts["messages"] += len(message)
        counts["blocks"] += message.numel() / numerics.block
        counts["values"] += message.numel()
        counts["flips"] += float(flips.sum())
        counts["failed"] += float(message.any(1).sum())
        per = self.layers.setdefault(str(site.kind), {}).setdefault(site.layer, [0.0, 0.0])
        per[0], per[1] = per[0] + float(message.any(1).sum()), per[1] + len(message)
        for length in LENGTHS:
            if flips.shape[1] % length == 0:
                wrong = decode(flips, cost, length).view(len(message), -1)
                counts[f"failed_{length}"] += float(wrong.any(1).sum())


def bits_a_block(counts: dict[str, float], length: int | None) -> float:
    """Bits a block of 16 of a check alone (``None``) or after syndromes, pulled vectors and scales included."""
    blocks = counts["blocks"] / counts["messages"]
    failed = counts["failed" if length is None else f"failed_{length}"] / counts["messages"]
    own = 0.0 if length is None else 16 * length.bit_length() / length
    return SCALE_BITS + own + CHECK_BITS / blocks + 16 * failed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    wanted = MeasureSettings(
        asked.model, prompts=asked.prompts, samples=1, max_new_tokens=asked.new_tokens, max_batch=asked.max_batch,
        device=asked.device, micro_tokens=2048,
    )  # fmt: skip
    loaded, spec = load_named(wanted.model, wanted.device), get_spec(wanted.spec, wanted.numerics)
    layout = describe(loaded.model)
    rollouts, truth = _generate(loaded, spec, Plan.parse(FULL_PLAN), _requests(wanted, loaded, 0), wanted, print)
    plan, shapes = Plan.parse("r1-all+mid/s8", layout.num_layers), layout.recordable_shapes(spec)
    guidance = [restrict(record, plan, shapes, layout.num_layers) for record in truth]
    sites, seen = TrainerSites(layout, spec), Parities()
    with bound(loaded.model, sites):
        score(
            loaded.model, sites, rollouts, guidance=guidance, truth=truth, micro_tokens=wanted.micro_tokens,
            observer=seen,
        )  # fmt: skip
    whole: defaultdict[str, float] = defaultdict(float)
    table: list[dict[str, Any]] = []
    for kind, counts in seen.found.items():
        row: dict[str, Any] = {"kind": kind, "flip_rate": counts["flips"] / counts["values"]}
        row["failed"] = counts["failed"] / counts["messages"]
        for length in (None, *LENGTHS):
            if length is None or f"failed_{length}" in counts:
                name = "check" if length is None else f"syndrome {length}"
                row[name] = bits_a_block(counts, length)
                whole[name] += row[name] * counts["blocks"]
        whole["blocks"] += counts["blocks"]
        table.append(row)
    rows = sum(record.rows for record in truth)
    overall = {name: value / whole["blocks"] for name, value in whole.items() if name != "blocks"}
    by_layer = {k: {str(n): f / m for n, (f, m) in per.items()} for k, per in seen.layers.items()}
    found = {"model": wanted.model, "device": str(next(loaded.model.parameters()).device), "rows": rows, "kinds": table}
    found |= {"bits_a_block": overall, "failed_by_layer": by_layer}
    for row in table:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()))
    print(f"all sites, {rows} tokens: " + ", ".join(f"{k} {v:.3g} bits a block" for k, v in overall.items()))
    if asked.output:
        asked.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
