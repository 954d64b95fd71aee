"""What distinguishes one way of pairing a quantized rollout with its trainer from another.

A method answers four questions: what does the rollout quantize, what does the trainer quantize, does the trainer follow
the rollout's rounding, and which settings of the run does it bring along (a loss of its own, something the engine has
to add or return). Everything else (advantages, loss, correction, optimizer, data, seeds, route replay) is the same in
every arm of a comparison, so it is not here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tracefp4.config import Config
from tracefp4.core import Kind
from tracefp4.errors import ConfigError
from tracefp4.formats.spec import Spec, get_spec
from tracefp4.guidance.plan import ALL_KINDS, Plan


class Method:
    """Base of all methods; the defaults are those of a method that quantizes both sides alike."""

    name: ClassVar[str]
    guided: ClassVar[bool] = False
    """The engine records quantization outcomes and every trainer forward over rollout tokens follows them."""
    kinds: ClassVar[tuple[Kind, ...]] = ALL_KINDS
    """Kinds of site that are recorded, if any are."""

    def rollout_spec(self, spec: Spec) -> Spec:
        """What the engine quantizes, given the run's deployment ``spec``."""
        return spec

    def trainer_spec(self, spec: Spec) -> Spec:
        """What the trainer's forward fake-quantizes."""
        return spec

    def plan(self, plan: Plan) -> Plan:
        """What of a run's ``plan`` the method follows.

        Raises:
            ConfigError: none of its sites.
        """
        kinds = tuple(kind for kind in plan.kinds if kind in self.kinds)
        if not kinds:
            wanted = ", ".join(self.kinds)
            raise ConfigError(f"method {self.name!r} follows guidance of {wanted}, and plan '{plan}' has none of them")
        return replace(plan, kinds=kinds, spans=tuple(span for span in plan.spans if span[0] in kinds))

    def settings(self, config: Config) -> Config:
        """The run's settings with what this method brings along; a setting that already fits is left as it is.

        Applied once before a run, and again to the resolved configuration when it resumes, so that
        ``settings(settings(c)) == settings(c)`` must hold.
        """
        return config


def unquantized() -> Spec:
    """The spec that quantizes nothing."""
    return get_spec("bf16")


def weights_only(spec: Spec) -> Spec:
    """``spec`` with activations and KV cache in bfloat16: W4A16 for an FP4 spec."""
    if spec.activations is None and spec.kv is None:
        return spec
    return replace(spec, name=f"{spec.name}/w4a16", activations=None, kv=None)
