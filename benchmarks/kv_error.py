"""Which part of an FP4 KV cache costs a policy what: keys or values, and what treating them first would save.

    python benchmarks/kv_error.py smollm2-moe --texts 12 --device cpu

Scores English text (docstrings of Python's library) with K and V rounded as a spec says, and compares log-probabilities
with those of the same model in bfloat16. Treatments that change nothing but the rounding error:

    rotated   vectors times a Hadamard matrix with random signs before rounding, and back: outliers spread over a head
    centred   less their mean over all tokens, by layer, head and channel; added again after rounding. Attention would
              not notice a constant added to all keys, so an engine could leave it out
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tracefp4.core import Kind, Site
from tracefp4.formats.numerics import Numerics
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.models.binding import bound
from tracefp4.models.key_basis import random_signs, turned
from tracefp4.models.layout import ModelLayout, describe
from tracefp4.rl.policies import load_named
from tracefp4.rl.statistics import cluster_sums, ratio_bootstrap
from tracefp4.training.batch import Example, collate
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites

MODULES = ("argparse", "bisect", "collections/__init__", "contextlib", "copy", "csv", "decimal", "difflib", "doctest",
           "enum", "functools", "heapq", "inspect", "locale", "logging/__init__", "pprint", "queue", "random",
           "statistics", "string", "textwrap", "threading", "typing", "unittest/__init__")  # fmt: skip
Treatment = Callable[[Site, Tensor, Callable[[Tensor], Tensor]], Tensor]
"""Given a site, its vectors ``(tokens, heads, width)`` float32 and how they are rounded: the rounded vectors."""


class Treated(TrainerSites):
    """Sites of a trainer whose keys and values are treated before they are rounded."""

    def __init__(self, layout: ModelLayout, spec: Spec, treatments: Mapping[Kind, Treatment]) -> None:
        super().__init__(layout, spec)
        self.treatments = treatments

    def values(self, site: Site, x: Tensor, numerics: Numerics) -> Tensor:
        """As the trainer's, of treated vectors."""
        heads = self.shapes[site].vectors

        def rounded(y: Tensor) -> Tensor:
            return super(Treated, self).values(site, y.reshape(x.shape).to(x.dtype), numerics).view_as(y).float()

        treat = self.treatments[site.kind]
        return treat(site, x.view(-1, heads, x.shape[1]).float(), rounded).reshape(x.shape).to(x.dtype)


class Means:
    """Mean vector of each site, head and channel; looks first, then centres."""

    def __init__(self) -> None:
        self._sums: dict[Site, tuple[Tensor, int]] = {}

    def look(self, site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        """Add vectors to the means; they are not rounded."""
        total, count = self._sums.get(site, (torch.zeros_like(x[0]), 0))
        self._sums[site] = total + x.sum(0), count + len(x)
        return x

    def centred(self, then: Treatment) -> Treatment:
        """Another treatment of what is left without the mean."""

        def treat(site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
            total, count = self._sums[site]
            return then(site, x - total / count, rounded) + total / count

        return treat


def hadamard(width: int) -> Tensor:
    """Orthonormal ``(width, width)`` float32: a Hadamard matrix whose rows have random signs."""
    return turned(torch.eye(width), random_signs(width))


def exact(site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Not rounded."""
    return x


def plain(site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounded as it is."""
    return rounded(x)


def rotated(site: Site, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounded in a rotated basis."""
    turn = hadamard(x.shape[-1]).to(x.device)
    return rounded(x @ turn) @ turn.T


def texts(count: int) -> list[str]:
    """Docstrings of library modules, 300 to 1,200 characters of each, as far as this Python has them."""
    found: list[str] = []
    for name in MODULES:
        path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else None
        if text is not None and len(text) >= 300:
            found.append(text[:1200])
    return found[:count]


def line(delta: Tensor, owner: Sequence[int]) -> str:
    """What log-probabilities ``delta`` above those of bfloat16 cost, with an interval over texts, and how they lie."""
    cost = ratio_bootstrap(*cluster_sums(-delta, owner))
    between = "one text: none" if cost.low is None else f"[{cost.low:.3f}, {cost.high:.3f}]"
    k3 = (delta.exp() - 1 - delta).mean()
    return f"{cost.estimate:10.3f} {between:16} {delta.abs().mean():9.3f} {k3:8.3f}"


def arguments(description: str | None, spec: str) -> argparse.ArgumentParser:
    """A parser for a policy, a spec, texts and a device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy")
    parser.add_argument("--spec", default=spec)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    return parser


class Subject:
    """A policy and the texts that it scores."""

    def __init__(self, policy: str, count: int, device: str) -> None:
        loaded = load_named(policy, device)
        self.model, self.layout, self.device = loaded.model.eval(), describe(loaded.model), torch.device(device)
        chunks = [tuple(loaded.tokenizer(text)["input_ids"]) for text in texts(count)]
        self.examples = [Example(tokens, 1, index=index) for index, tokens in enumerate(chunks)]
        self.owner = [example.index for example in self.examples for _ in range(example.rows)]
        """The text of each token."""

    def score(self, sites: TrainerSites) -> Tensor:
        """Log-probabilities of all tokens, float64 on the host."""
        parts = []
        with bound(self.model, sites), torch.no_grad():
            for example in self.examples:
                batch = collate([example], self.device)
                with sites.batch(batch):
                    parts.append(token_logprobs(self.model, batch)[0][batch.response])
        return torch.cat(parts).double().cpu()

    def introduce(self, floor: Tensor) -> None:
        """Print what is scored, and how likely it is in bfloat16."""
        print(f"{len(floor)} tokens of {len(self.examples)} texts; {-floor.mean():.4f} nats a token in bfloat16")


def main() -> None:
    """Print a line a treatment."""
    chosen = arguments(__doc__, "nvfp4-kv4").parse_args()
    subject = Subject(chosen.policy, chosen.texts, chosen.device)

    def score(spec: str, k: Treatment = plain, v: Treatment = plain) -> Tensor:
        return subject.score(Treated(subject.layout, get_spec(spec), {Kind.K: k, Kind.V: v}))

    floor, means = score("bf16"), Means()
    score(chosen.spec, k=means.look, v=means.look)
    subject.introduce(floor)
    print(f"{'keys':20} {'values':20} {'more nats':>10} {'95 % interval':16} {'mean |d|':>9} {'k3':>8}")
    named: dict[str, Treatment] = {
        "exact": exact,
        "rounded": plain,
        "rotated": rotated,
        "centred": means.centred(plain),
        "centred, rotated": means.centred(rotated),
    }
    for k, v in [("rounded", "rounded"), *((k, "exact") for k in list(named)[1:]),
                 *(("exact", v) for v in list(named)[1:]), ("centred, rotated", "rotated")]:  # fmt: skip
        delta = score(chosen.spec, k=named[k], v=named[v]) - floor
        print(f"{k:20} {v:20} {line(delta, subject.owner)}", flush=True)


if __name__ == "__main__":
    main()
