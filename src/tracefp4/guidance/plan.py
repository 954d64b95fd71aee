"""Which quantization outcomes of the rollout guide the trainer, in one short name.

A plan says four things: how many low bits of each code are kept, in which layers, for which kinds of site, and in how
many bits a block scale travels. More of each costs bytes and buys agreement. The name reads in that order::

    plan   = "none" | code "-" layers [ ":" kind ] { "+" kind } [ "/" scale ]
    code   = "r1" | "r2" | "r3" | "r4"          low bits of each 4-bit code
           | "c1" | "c2" | "c3" | "c4"          checks of these bits, which are pulled where a check fails
    layers = "all" | "l" n | "half" | "quarter" every decoder layer, or the n deepest
    kind   = word [ "[" span { "," span } "]" ] of these layers all, or only those in the spans
    word   = "experts" | "mid" | "kv" | "k" | "v" | "latent"
    span   = n | n "-" n                        a layer, or a range with both ends; layer 0 is the first
    scale  = "s8" | "s3" | "s2"                 whole bytes, or congruent in 3 or 2 bits

Without ``:`` a plan holds ``experts`` (the experts' input) and ``kv`` (K, V, and the latent vector of latent
attention): the sites of the paper. ``+mid`` adds the input of the down projection. ``:`` starts from one kind instead,
for ablations. ``half`` and ``quarter`` stand for a number of layers that depends on the model; a plan of a known model
has the number in its name. Without ``/`` the scales take what was measured to be enough for the sites of the plan
(:func:`enough_scale_bits`). Some plans:

``r1-l20``          1 bit, the 20 deepest layers: the paper's plan for a model of 40 layers
``r1-all+mid``      1 bit, every layer, the down projection's input too; scales in 2 bits
``r1-all+mid/s8``   the same with whole scales
``r1-all``          1 bit, every layer, the paper's sites; scales in 3 bits
``c1-all+mid``      scales in 2 bits and a check a token and site; bits only where the trainer's own fail it
``r1-all:kv``       only the KV cache
``r4-all:experts+mid``   whole codes of both expert inputs, nothing of the KV cache
``r1-all:experts[0-19]+kv[0-29]``   the experts' input in the first 20 layers, the KV cache in the first 30
``none``            no guidance
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tracefp4.core import KV_KINDS, Kind, Site, SiteShape
from tracefp4.errors import ConfigError

PAPER_KINDS = (Kind.EXPERTS_IN, *KV_KINDS)
"""Kinds of a plan that names none."""

ALL_KINDS = (Kind.EXPERTS_IN, Kind.EXPERTS_MID, *KV_KINDS)
"""Every kind, in the order in which a plan lists them."""

SCALE_BITS = (8, 3, 2)
"""Bits of a block scale: whole, or congruent."""

WHOLE = 8
"""Bits of a whole block scale."""

_WORDS: dict[str, tuple[Kind, ...]] = {
    "experts": (Kind.EXPERTS_IN,),
    "kv": KV_KINDS,
    "k": (Kind.K,),
    "v": (Kind.V,),
    "latent": (Kind.LATENT,),
    "mid": (Kind.EXPERTS_MID,),
}
_NUMBER = "(?:0|[1-9][0-9]{0,4})"
_SPAN = f"{_NUMBER}(?:-{_NUMBER})?"
_KIND = rf"[a-z]+(?:\[{_SPAN}(?:,{_SPAN})*\])?"
_GRAMMAR = re.compile(
    rf"([rc])([1-4])-(?:all|l([1-9][0-9]{{0,4}})|(half|quarter))(?::({_KIND}))?((?:\+{_KIND})*)(?:/s([238]))?"
)
_SHARES = {"half": 2, "quarter": 4}

Spans = tuple[tuple[int, int], ...]
"""Ranges of layers with both ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is recorded of a rollout.

    Args:
        bits: low bits of each code, 1 to 4; 0 only in the plan ``none``.
        depth: number of deepest decoder layers, or ``None`` for all.
        kinds: kinds of site, at least one (none at all is the plan ``none``). Kept in the order of :data:`ALL_KINDS`.
        scale_bits: 8, or 3 or 2 for congruent scales; 0 takes those of :func:`enough_scale_bits`.
        spans: kinds that are recorded in some layers only, and in which: ranges with both ends. Kept sorted and merged.
        checked: the bits stay with the engine, and a check of them is sent for each token and site
            (:mod:`tracefp4.training.pulls`).

    Raises:
        ConfigError: a value outside these ranges.
    """

    bits: int
    depth: int | None = None
    kinds: tuple[Kind, ...] = PAPER_KINDS
    scale_bits: int = 0
    spans: tuple[tuple[Kind, Spans], ...] = ()
    checked: bool = False

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in ALL_KINDS]
        if unknown:
            raise ConfigError(f"a plan has kinds of site {', '.join(ALL_KINDS)}, got {unknown[0]!r}")
        object.__setattr__(self, "kinds", tuple(kind for kind in ALL_KINDS if kind in self.kinds))
        if not self.scale_bits:
            object.__setattr__(self, "scale_bits", enough_scale_bits(self.depth, self.kinds, self.spans))
        if not self.kinds:
            if (self.bits, self.depth, self.scale_bits, self.checked) != (0, None, WHOLE, False):
                raise ConfigError("a plan without kinds of site keeps nothing; that is Plan(0, kinds=()), or 'none'")
        elif self.bits not in (1, 2, 3, 4):
            raise ConfigError(f"a plan keeps 1 to 4 bits of each code, got {self.bits}")
        elif self.depth is not None and not 1 <= self.depth < 100_000:
            raise ConfigError(f"a plan covers at least 1 layer, got {self.depth}; None covers all of them")
        elif self.scale_bits not in SCALE_BITS:
            raise ConfigError(f"scales travel in 8 bits (whole), 3 or 2 (congruent), got {self.scale_bits}")
        object.__setattr__(self, "spans", _ordered(self.spans, self.kinds))

    def __str__(self) -> str:
        if not self.kinds:
            return "none"
        layers = "all" if self.depth is None else f"l{self.depth}"
        # Named wherever a name without would mean, or once meant, something else: read again anywhere, it is this plan.
        unsaid = self.scale_bits == WHOLE == enough_scale_bits(self.depth, self.kinds, self.spans)
        scale = "" if unsaid else f"/s{self.scale_bits}"
        return f"{'c' if self.checked else 'r'}{self.bits}-{layers}{_kind_text(self.kinds, dict(self.spans))}{scale}"

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @classmethod
    def parse(cls, text: str, num_layers: int | None = None, *, scale_bits: int = 0) -> Plan:
        """Read a plan's name (grammar above). ``str`` of the result is the shortest name of the same plan.

        Args:
            text: the name.
            num_layers: decoder layers of the model, for plans over ``half`` or a ``quarter`` of them.
            scale_bits: of a name that says none; 0 takes those of :func:`enough_scale_bits`.

        Raises:
            ConfigError: no such plan, with the nearest one; or a plan that depends on a model that is not known.
        """
        if text == "none":
            return cls(0, kinds=())
        match = _GRAMMAR.fullmatch(text)
        if match is None:
            raise ConfigError(f"unknown plan {text!r} (did you mean {_nearest(text)!r}?)")
        word, bits, depth, share, first, more, scale = match.groups()
        if share and num_layers is None:
            raise ConfigError(f"plan {text!r} depends on the model; write the number of layers, as in 'r1-l20'")
        if share and num_layers is not None:
            depth = str(max(1, num_layers // _SHARES[share]))
        kinds: list[Kind] = [] if first else list(PAPER_KINDS)
        spans: list[tuple[Kind, Spans]] = []
        for item in [w for w in (first, *more.split("+")) if w]:
            name, _, ranges = item.partition("[")
            if name not in _WORDS:
                raise ConfigError(f"plan {text!r}: unknown kind of site {name!r} (did you mean {_nearest(text)!r}?)")
            twice = [kind for kind in _WORDS[name] if kind in kinds]
            if twice:
                raise ConfigError(f"plan {text!r} names the sites {twice[0].value!r} twice; leave out {name!r}")
            kinds += _WORDS[name]
            if ranges:
                spans += [(kind, _read_spans(ranges.rstrip("]"))) for kind in _WORDS[name]]
        depth = int(depth) if depth else None
        return cls(int(bits), depth, tuple(kinds), int(scale or scale_bits), tuple(spans), checked=word == "c")

    @classmethod
    def recorded(cls, text: str) -> Plan:
        """Read the name of a plan in a record or frame, where a name without scale bits means whole scales.

        Raises:
            ConfigError: no such plan.
        """
        return cls.parse(text, scale_bits=WHOLE)

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
                f"(did you mean {str(replace(self, depth=None))!r}?)"
            )
        deepest = max((last for _, ranges in self.spans for _, last in ranges), default=0)
        if deepest >= num_layers:
            raise ConfigError(f"plan {str(self)!r} names layer {deepest}, the model has layers 0 to {num_layers - 1}")
        first = 0 if self.depth is None else num_layers - self.depth
        chosen = tuple(s for s in shapes if s.site.layer >= first and self._holds(s.site))
        if not chosen:
            raise ConfigError(f"plan {str(self)!r} selects no site; {_inventory(shapes)}")
        return chosen

    def _holds(self, site: Site) -> bool:
        """Whether the site is of a kind and in a span of this plan."""
        ranges = dict(self.spans).get(site.kind)
        return site.kind in self.kinds and (ranges is None or any(a <= site.layer <= b for a, b in ranges))


def enough_scale_bits(
    depth: int | None,
    kinds: Collection[Kind],
    spans: Collection[object] = (),
    rounded: Collection[Kind] = ALL_KINDS,
) -> int:
    """Bits of a block scale that a plan needs, by the share of restored scales that failed their checks when measured.

    A trainer restores a scale from its own, which must not have drifted: everything in front has to be guided.

    ====  ========================================================================================================
    bits  plans
    ====  ========================================================================================================
    2     every site of every layer: 5e-5 to 2e-3 of the chunks fail, and k3 is that of whole scales
    3     every layer, all but the down projection's input: 2e-4 fail, where 2 bits fail in 5e-3; and K and V alone, for
          a trainer that rounds nothing else of a rollout (``trace_quads``): none, where 2 bits fail in 1e-2
    8     layers or other kinds left out: what is not guided drifts, and 3 bits fail in 17 % (K and V alone) to 38 %
    ====  ========================================================================================================

    That holds for a trainer that takes one step on fresh rollouts of the embedded engine; runs of another kind take
    whole scales (:func:`tracefp4.rl.plans.named_scales`). The figures are in ``docs/results.md``.

    Args:
        depth: number of deepest layers, ``None`` for all.
        kinds: kinds of site.
        spans: kinds that are recorded in some layers only.
        rounded: kinds of site that the trainer rounds.
    """
    missing = set(rounded) - set(kinds)
    if depth is not None or spans or missing - {Kind.EXPERTS_MID}:
        return WHOLE
    return 3 if missing or set(rounded) != set(ALL_KINDS) else 2


def says_scale_bits(text: str) -> bool:
    """Whether a plan's name says in how many bits a block scale travels."""
    return re.search(r"/s[238]$", text) is not None


def plan_of(sites: Collection[Site], shapes: Iterable[SiteShape], bits: int = 1, scale_bits: int = 0) -> Plan:
    """The plan that records some sites of a model and no others.

    Args:
        sites: at least one; of the kinds ``k`` and ``v`` or any other.
        shapes: every site of the model under its spec.
        bits: low bits of each code.
        scale_bits: 8, 3 or 2; 0 for those of the plan's kind.

    Raises:
        ConfigError: no site, or one that the model lacks.
    """
    layers: dict[Kind, list[int]] = {}
    for shape in shapes:
        layers.setdefault(shape.site.kind, []).append(shape.site.layer)
    spans: list[tuple[Kind, Spans]] = []
    chosen = [kind for kind in ALL_KINDS if any(site.kind == kind for site in sites)]
    for kind in chosen:
        mine = {site.layer for site in sites if site.kind == kind}
        if not mine <= set(layers.get(kind, ())):
            raise ConfigError(f"site {min(mine - set(layers.get(kind, ())))}.{kind} is not one of the model's")
        if mine != set(layers[kind]):
            spans.append((kind, tuple(_runs(sorted(layers[kind]), mine))))
    # Kinds of the KV cache that the model does not have cost nothing, and make the name short.
    absent = [kind for kind in KV_KINDS if kind not in layers] if set(KV_KINDS) & set(chosen) else []
    like = [ranges for kind, ranges in spans if kind in KV_KINDS]
    if like:
        spans += [(kind, like[0]) for kind in absent]
    return Plan(bits, None, (*chosen, *absent), scale_bits, tuple(spans))


def _runs(all_layers: Sequence[int], mine: Collection[int]) -> Iterable[tuple[int, int]]:
    """Ranges that hold the layers ``mine`` and none other of ``all_layers``."""
    start: int | None = None
    before = 0
    for layer in all_layers:
        if layer in mine and start is None:
            start = layer
        elif layer not in mine and start is not None:
            yield start, before
            start = None
        before = layer
    if start is not None:
        yield start, before


def _read_spans(text: str) -> Spans:
    ends = [part.partition("-") for part in text.split(",")]
    return tuple((int(first), int(last or first)) for first, _, last in ends)


def _ordered(spans: Iterable[tuple[Kind, Spans]], kinds: Sequence[Kind]) -> tuple[tuple[Kind, Spans], ...]:
    """Spans in the order of the kinds, each sorted, neighbours merged."""
    given = dict(spans)
    out: list[tuple[Kind, Spans]] = []
    for kind in given:
        if kind not in kinds:
            raise ConfigError(f"a plan has spans for the sites {kind!r}, but does not record them")
    for kind in kinds:
        merged: list[tuple[int, int]] = []
        for first, last in sorted(given.get(kind, ())):
            if first < 0 or last < first:
                raise ConfigError(f"a span of layers goes from a layer to the same or a deeper one, got {first}-{last}")
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        if merged:
            out.append((kind, tuple(merged)))
    return tuple(out)


def _span_text(ranges: Spans | None) -> str:
    if ranges is None:
        return ""
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) + "]"


def _kind_text(kinds: Sequence[Kind], spans: Mapping[Kind, Spans]) -> str:
    """The part of a plan's name that says which kinds it holds: empty for the paper's."""
    left = set(kinds)
    words = []
    for word, group in _WORDS.items():
        alike = len({spans.get(kind) for kind in group}) == 1
        if alike and left.issuperset(group):
            words.append(word + _span_text(spans.get(group[0])))
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
    words = [word + bits for word in "rc" for bits in "1234"]
    names = [f"{w}-{d}{k}{s}" for w in words for d in layers for k in kinds for s in ("", "/s3", "/s2")]
    return difflib.get_close_matches(text.lower(), [*names, "none"], n=1, cutoff=0.0)[0]
