"""Which quantization outcomes of the rollout guide the trainer, in one short name.

A plan says four things: how many low bits of each code are kept, in which layers, for which kinds of site, and in how
many bits a block scale travels. More of each costs bytes and buys agreement. The name reads in that order::

    plan   = "none" | code "-" layers [ ":" kind ] { "+" kind } [ "/" scale ]
    code   = "r1" | "r2" | "r3" | "r4"          low bits of each 4-bit code
    layers = "all" | "l" n | "half" | "quarter" every decoder layer, or the n deepest
    kind   = "experts" | "mid" | "kv" | "k" | "v" | "latent"
    scale  = "s8" | "s3" | "s2"                 whole bytes (the default), or congruent in 3 or 2 bits

Without ``:`` a plan holds ``experts`` (the experts' input) and ``kv`` (K, V, and the latent vector of latent
attention): the sites of the paper. ``+mid`` adds the input of the down projection. ``:`` starts from one kind instead,
for ablations. ``half`` and ``quarter`` stand for a number of layers that depends on the model; a plan of a known model
has the number in its name. Some plans:

``r1-l20``          1 bit, the 20 deepest layers: the paper's plan for a model of 40 layers
``r1-all+mid``      1 bit, every layer, the down projection's input too
``r1-all+mid/s3``   the same with scales in 3 bits
``r1-all:kv``       only the KV cache
``r4-all:experts+mid``   whole codes of both expert inputs, nothing of the KV cache
``none``            no guidance
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tracefp4.core import KV_KINDS, Kind, SiteShape
from tracefp4.errors import ConfigError

PAPER_KINDS = (Kind.EXPERTS_IN, *KV_KINDS)
"""Kinds of a plan that names none."""

ALL_KINDS = (Kind.EXPERTS_IN, Kind.EXPERTS_MID, *KV_KINDS)
"""Every kind, in the order in which a plan lists them."""

SCALE_BITS = (8, 3, 2)
"""Bits of a block scale: whole, or congruent."""

_WORDS: dict[str, tuple[Kind, ...]] = {
    "experts": (Kind.EXPERTS_IN,),
    "kv": KV_KINDS,
    "k": (Kind.K,),
    "v": (Kind.V,),
    "latent": (Kind.LATENT,),
    "mid": (Kind.EXPERTS_MID,),
}
_GRAMMAR = re.compile(r"r([1-4])-(?:all|l([1-9][0-9]{0,4})|(half|quarter))(?::([a-z]+))?((?:\+[a-z]+)*)(?:/s([238]))?")
_SHARES = {"half": 2, "quarter": 4}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is recorded of a rollout.

    Args:
        bits: low bits of each code, 1 to 4; 0 only in the plan ``none``.
        depth: number of deepest decoder layers, or ``None`` for all.
        kinds: kinds of site, at least one (none at all is the plan ``none``). Kept in the order of :data:`ALL_KINDS`.
        scale_bits: 8, or 3 or 2 for congruent scales.

    Raises:
        ConfigError: a value outside these ranges.
    """

    bits: int
    depth: int | None = None
    kinds: tuple[Kind, ...] = PAPER_KINDS
    scale_bits: int = 8

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in ALL_KINDS]
        if unknown:
            raise ConfigError(f"a plan has kinds of site {', '.join(ALL_KINDS)}, got {unknown[0]!r}")
        object.__setattr__(self, "kinds", tuple(kind for kind in ALL_KINDS if kind in self.kinds))
        if not self.kinds:
            if (self.bits, self.depth, self.scale_bits) != (0, None, 8):
                raise ConfigError("a plan without kinds of site keeps nothing; that is Plan(0, kinds=()), or 'none'")
        elif self.bits not in (1, 2, 3, 4):
            raise ConfigError(f"a plan keeps 1 to 4 bits of each code, got {self.bits}")
        elif self.depth is not None and not 1 <= self.depth < 100_000:
            raise ConfigError(f"a plan covers at least 1 layer, got {self.depth}; None covers all of them")
        elif self.scale_bits not in SCALE_BITS:
            raise ConfigError(f"scales travel in 8 bits (whole), 3 or 2 (congruent), got {self.scale_bits}")

    def __str__(self) -> str:
        if not self.kinds:
            return "none"
        layers = "all" if self.depth is None else f"l{self.depth}"
        scale = "" if self.scale_bits == 8 else f"/s{self.scale_bits}"
        return f"r{self.bits}-{layers}{_kind_text(self.kinds)}{scale}"

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @classmethod
    def parse(cls, text: str, num_layers: int | None = None) -> Plan:
        """Read a plan's name (grammar above). ``str`` of the result is the shortest name of the same plan.

        Args:
            text: the name.
            num_layers: decoder layers of the model, for plans over ``half`` or a ``quarter`` of them.

        Raises:
            ConfigError: no such plan, with the nearest one; or a plan that depends on a model that is not known.
        """
        if text == "none":
            return cls(0, kinds=())
        match = _GRAMMAR.fullmatch(text)
        if match is None:
            raise ConfigError(f"unknown plan {text!r} (did you mean {_nearest(text)!r}?)")
        bits, depth, share, first, more, scale = match.groups()
        if share and num_layers is None:
            raise ConfigError(f"plan {text!r} depends on the model; write the number of layers, as in 'r1-l20'")
        if share and num_layers is not None:
            depth = str(max(1, num_layers // _SHARES[share]))
        words = [w for w in (first, *more.split("+")) if w]
        kinds: list[Kind] = [] if first else list(PAPER_KINDS)
        for word in words:
            if word not in _WORDS:
                raise ConfigError(f"plan {text!r}: unknown kind of site {word!r} (did you mean {_nearest(text)!r}?)")
            twice = [kind for kind in _WORDS[word] if kind in kinds]
            if twice:
                raise ConfigError(f"plan {text!r} names the sites {twice[0].value!r} twice; leave out {word!r}")
            kinds += _WORDS[word]
        return cls(int(bits), int(depth) if depth else None, tuple(kinds), int(scale or 8))

    def select(self, shapes: Iterable[SiteShape], num_layers: int) -> tuple[SiteShape, ...]:
        """The sites of a model that this plan records, in the order given.

        Args:
            shapes: every site of the model under its spec (:meth:`tracefp4.models.layout.ModelLayout.site_shapes`).
            num_layers: decoder layers of the model, with or without sites: ``l20`` of 40 layers is layers 20 to 39.

        Raises:
            ConfigError: more layers than the model has, or no site is left.
        """
        shapes = tuple(shapes)
        if not self.kinds:
            return ()
        if self.depth is not None and self.depth > num_layers:
            raise ConfigError(
                f"plan {str(self)!r} covers {self.depth} layers, the model has {num_layers} "
                f"(did you mean {str(Plan(self.bits, None, self.kinds, self.scale_bits))!r}?)"
            )
        first = 0 if self.depth is None else num_layers - self.depth
        chosen = tuple(s for s in shapes if s.site.layer >= first and s.site.kind in self.kinds)
        if not chosen:
            raise ConfigError(f"plan {str(self)!r} selects no site; {_inventory(shapes)}")
        return chosen


def _kind_text(kinds: Sequence[Kind]) -> str:
    """The part of a plan's name that says which kinds it holds: empty for the paper's."""
    left = set(kinds)
    words = []
    for word, group in _WORDS.items():
        if left.issuperset(group):
            words.append(word)
            left -= set(group)
    start = "" if words[:2] == ["experts", "kv"] else ":"
    return start + "+".join(words) if start else "".join(f"+{word}" for word in words[2:])


def _inventory(shapes: Sequence[SiteShape]) -> str:
    if not shapes:
        return "the spec quantizes no site of this model"
    kinds = sorted({str(s.site.kind) for s in shapes})
    layers = [s.site.layer for s in shapes]
    return f"the model has {', '.join(kinds)} in layers {min(layers)} to {max(layers)}"


def _nearest(text: str) -> str:
    """The plan whose name is most like ``text``."""
    number = re.search(r"l([1-9][0-9]{0,4})", text.lower())
    layers = ["all", f"l{number.group(1)}" if number else "l20", "half", "quarter"]
    kinds = ["", "+mid", ":kv", ":experts", ":experts+mid"]
    names = [f"r{b}-{d}{k}{s}" for b in "1234" for d in layers for k in kinds for s in ("", "/s3", "/s2")]
    return difflib.get_close_matches(text.lower(), [*names, "none"], n=1, cutoff=0.0)[0]
