"""Arms of a comparison, and which of them make up each table of the paper.

An *arm* is a method under a deployment and a plan, run with several seeds; every arm shares the rest of one
configuration. Its name says only what differs from that configuration: ``trace``, ``qat@nvfp4-kv4`` (another spec),
``trace.r4-all`` (another plan). Tables share arms: the ``bf16`` runs are the reference of all of them.

=====  ================================================================================================================
table  rows
=====  ================================================================================================================
main   the methods that were asked for, under the configuration's own spec and plan
t1     all methods, NVFP4 weights, activations and KV cache
t3     NVFP4 for weights and activations only, and for the KV cache only
t4     MXFP4 weights and cache with MXFP8 or MXFP4 activations
t5     plans of guidance: the configuration's own, four to one bits in every layer, one bit in half and in a quarter,
       with the down projection, and checks in the place of bits
t6     truncated importance sampling with score centering, at its best step, and score centering alone
t7     post-hoc quantization of the policy that was trained in bfloat16, beside the FP4 policies
=====  ================================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracefp4.errors import ConfigError, suggest
from tracefp4.guidance.plan import Plan
from tracefp4.methods import get_method
from tracefp4.rl.plans import named_scales

REFERENCE = "bf16"
"""The arm that others are compared with."""
MAIN_METHODS = ("bf16", "qat", "qarl", "quads", "tis_sc", "trace")
PLANS = (
    *("r4-all/s8", "r3-all/s8", "r2-all/s8", "r1-all/s8", "r1-half", "r1-quarter"),
    *("r1-all+mid/s8", "r1-half+mid", "r1-quarter+mid", "c1-all+mid/s2"),
)
"""Plans of table t5 besides the configuration's own."""
POSTHOC = ("nvfp4", "4over6-mse", "4over6-mae", "4over6-absmax", "hscale")
"""Methods of post-hoc quantization, in the order of table t7."""
NVFP4 = "nvfp4-w4a4-kv4"
SPEC_NAMES = {
    "bf16": "BF16 W/A + BF16 KV",
    NVFP4: "NVFP4 W/A + NVFP4 KV",
    "nvfp4-w4a4": "NVFP4 W/A + BF16 KV",
    "nvfp4-kv4": "BF16 W/A + NVFP4 KV",
    "nvfp4-w4a16": "NVFP4 W, BF16 A + BF16 KV",
    "nvfp4-w4a16-kv4": "NVFP4 W, BF16 A + NVFP4 KV",
    "mxfp4-w4a8-kv4": "MXFP4 W, MXFP8 A + MXFP4 KV",
    "mxfp4-w4a4-kv4": "MXFP4 W/A + MXFP4 KV",
    "mxfp4-w4a16": "MXFP4 W, BF16 A + BF16 KV",
    "mxfp4-w4a16-kv4": "MXFP4 W, BF16 A + MXFP4 KV",
}
"""How tables write a spec."""
TABLE_TITLES = {
    "main": "Methods",
    "t1": "T1. Joint NVFP4: weights, activations and KV cache",
    "t3": "T3. NVFP4 for weights and activations, or for the KV cache",
    "t4": "T4. MXFP4",
    "t5": "T5. Plans of guidance",
    "t6": "T6. Score centering, at its best step",
    "t7": "T7. The final FP4 policy against post-hoc quantization",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One line of a comparison."""

    name: str
    method: str
    """What a table calls the method."""
    spec: str
    plan: str
    """Empty for a method that follows none."""
    settings: tuple[str, ...]
    """Overrides of the shared configuration, ``a.b=value``."""

    @property
    def label(self) -> str:
        """What a table calls it: the method, and the plan where it has one."""
        return f"{self.method} {self.plan}".strip()


@dataclass(frozen=True, slots=True)
class Base:
    """What the shared configuration says of itself."""

    spec: str
    plan: str
    pulls: bool = True
    """Whether its runs may follow checked plans with congruent scales."""
    calm: bool = True
    """Whether plans that name no bits of a scale take the fewest (:func:`tracefp4.rl.plans.named_scales`)."""

    def plans(self) -> list[str]:
        """Plans of table t5 where none are named, the configuration's own first."""
        own = [] if self.plan == "none" else [self.plan]
        return list(dict.fromkeys([*own, *(plan for plan in PLANS if self.pulls or plan[0] != "c")]))

    def arm(self, method: str, spec: str | None = None, plan: str | None = None, *extra: str, suffix: str = "") -> Arm:
        """An arm; ``spec`` and ``plan`` that are those of the configuration leave no trace in its name."""
        name, settings = method, [f"method={method}"]
        shown_spec, shown_plan = spec or self.spec, followed(method, plan or self.plan, self.calm)
        if method == REFERENCE:
            return Arm(name, method, "bf16", "", tuple(settings))
        if spec not in (None, self.spec):
            name, settings = f"{name}@{spec}", [*settings, f"spec={spec}"]
        if plan not in (None, self.plan):
            name, settings = f"{name}.{str(plan).replace('/', '-')}", [*settings, f"plan={plan}"]
        label = f"{method} {suffix}".strip()
        name = f"{name}.{suffix}" if suffix else name
        return Arm(name, label, shown_spec, shown_plan, (*settings, *extra))


def followed(method: str, plan: str, calm: bool = True) -> str:
    """What tables call the part of ``plan`` that a method follows; empty for one that follows none."""
    found = get_method(method)
    if not found.guided:
        return ""
    try:
        return str(found.plan(Plan.parse(named_scales(found, plan, calm))))
    except ConfigError:  # chosen as training goes, or a share of layers that are not known here
        return plan


def arms_of(table: str, base: Base, methods: Sequence[str] = MAIN_METHODS, plans: Sequence[str] = ()) -> list[Arm]:
    """The arms of a table, the reference first.

    Args:
        table: a key of :data:`TABLE_TITLES`.
        base: spec and plan of the shared configuration.
        methods: of the tables ``main`` and ``t1``.
        plans: of table ``t5``; by default those of :meth:`Base.plans`.

    Raises:
        ConfigError: no such table.
    """
    reference = base.arm(REFERENCE)
    rows: dict[str, list[Arm]] = {
        "main": [base.arm(method) for method in methods],
        "t1": [base.arm(method, NVFP4) for method in MAIN_METHODS],
        "t3": [
            *(base.arm(method, "nvfp4-w4a4") for method in ("qat", "quads", "trace")),
            *(base.arm(method, "nvfp4-kv4") for method in ("qat", "trace")),
        ],
        "t4": [base.arm(m, spec) for spec in ("mxfp4-w4a8-kv4", "mxfp4-w4a4-kv4") for m in ("qat", "trace")],
        "t5": [base.arm("trace", NVFP4, plan) for plan in plans or base.plans()],
        "t6": [
            base.arm("tis_sc", NVFP4),
            base.arm("tis_sc", NVFP4, None, "correction.name=none", suffix="without-tis"),
            base.arm("trace", NVFP4),
        ],
        "t7": [base.arm("qat", NVFP4), base.arm("trace", NVFP4)],
    }
    if table not in rows:
        raise ConfigError(f"unknown table {table!r}{suggest(table, rows)}")
    found = rows[table]
    return found if table == "main" else [reference, *(arm for arm in found if arm.name != REFERENCE)]


def to_probe(arms: Sequence[Arm]) -> Arm | None:
    """The arm of trace whose run is measured and profiled; ``None`` where there is none.

    Best that of the configuration's own spec and plan, which nothing is added to the name of, then joint NVFP4 under
    its own plan, then the first of the others.
    """
    found = {arm.name: arm for arm in arms if arm.plan}
    ranked = [*(name for name in ("trace", f"trace@{NVFP4}") if name in found), *found]
    return found[ranked[0]] if ranked else None


def parse_arm(text: str, base: Base) -> Arm:
    """An arm of the user's own: ``NAME:key=value,key=value``, such as ``icepop:method=trace,correction.name=icepop``.

    Raises:
        ConfigError: not of that form, or without a method.
    """
    name, separator, rest = text.partition(":")
    settings = tuple(part.strip() for part in rest.split(",") if part.strip())
    values = dict(part.split("=", 1) for part in settings if "=" in part)
    if not separator or not name or "/" in name or "method" not in values or len(values) != len(settings):
        raise ConfigError(f"--arm {text!r} is not of the form NAME:method=...,key=value")
    method = values["method"]
    plan = followed(method, values.get("plan", base.plan), base.calm)
    return Arm(name, name, "bf16" if method == REFERENCE else values.get("spec", base.spec), plan, settings)
