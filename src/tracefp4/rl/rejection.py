"""Rejection: dropping tokens or whole sequences on which trainer and rollout disagree too much.

Truncation lowers a weight; rejection sets it to 0. A rule looks at ``log rho = log p_old - log q`` of the response
tokens (``q`` the rollout, ``p_old`` the trainer) and keeps what lies inside its bounds. Several rules may be given;
what is kept must pass all of them.

=================  ==================  ===============================================================================
rule               default             keeps
=================  ==================  ===============================================================================
``token_k1``       ``0.5_2.0``         tokens with ``rho`` inside the bounds
``token_k2, k3``   none                tokens with ``k2 = log^2 rho / 2``, ``k3 = rho - 1 - log rho`` up to the bound
``seq_sum_k1``     ``0.5_2.0``         sequences with the product of ``rho`` inside the bounds
``seq_sum_k2``     none                sequences with the sum of ``k2`` up to the bound; ``seq_sum_k3`` likewise
``seq_mean_k1``    ``0.999_1.001``     sequences with the geometric mean of ``rho`` inside the bounds
``seq_mean_k3``    0.01                sequences with the mean of ``k3`` up to the bound; ``seq_mean_k2`` has no default
``seq_max_k2, 3``  none                sequences with the largest ``k2`` or ``k3`` up to the bound
``veto``           1e-4                sequences without a token whose ``rho`` is below the bound
``opsm``           1e-4                sequences, except those with ``A < 0`` and ``mean(log p_old - log p)`` above the
                                       bound: the policy has moved away from a bad sample, and is left alone
=================  ==================  ===============================================================================

Names and estimators are those of verl 0.9 (``rollout_rs`` in ``verl/trainer/ppo/rollout_corr_helper.py``); defaults are
those of its presets (``decoupled_geo_rs``, ``decoupled_seq_is_rs``, ``bypass_ppo_clip_k3_rs``), and where no preset has
one a bound must be given. verl's k1 is ``-log rho``, and its bounds are bounds of ``1 / rho``; ours are bounds of
``rho``, which is the same for bounds that are each other's reciprocal. ``veto`` is that of slime's MIS example
(``examples/train_infer_mismatch_helper``), ``opsm`` the off-policy sequence masking of DeepSeek-V3.2 with slime's
default (``--opsm-delta``).

A rejected token has weight 0 and still counts in the loss's denominators, so the rest of a batch weighs the same
whatever was rejected. verl removes it from the response mask; where its means then divide by the tokens that are left,
and where not, is in ``docs/methods.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, suggest

_BANDS = {"token_k1": (0.5, 2.0), "seq_sum_k1": (0.5, 2.0), "seq_mean_k1": (0.999, 1.001)}
_BOUNDS: dict[str, float | None] = {
    **dict.fromkeys(f"{level}_k{n}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for n in (2, 3)),
    "seq_mean_k3": 0.01,
    "veto": 1e-4,
    "opsm": 1e-4,
}
RULES = (*_BANDS, *_BOUNDS)
"""Names of all rules."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule with its bounds; a rule with one bound has it in ``high`` (``veto``: in ``low``)."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What rules look at; ``(B, S)`` float32, 0 outside the response."""

    log_ratio: Tensor
    mask: Tensor
    """Bool, true on response tokens."""
    moved: Tensor | None = None
    """``log p_old - log p``: how far the policy has moved from the samples; only ``opsm`` asks."""
    advantages: Tensor | None = None


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Read ``correction.reject``: rules separated by commas, each ``name``, ``name=bound`` or ``name=low_high``.

    Raises:
        ConfigError: an unknown rule, a bound that is missing or no positive number, or a band that is empty.
    """
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(text: str) -> Rule:
    name, given, bounds = text.partition("=")
    name = name.strip()
    if name not in RULES:
        raise ConfigError(f"correction.reject: unknown rule {name!r}{suggest(name, RULES)}")
    values = [_number(text, part) for part in bounds.split("_")] if given else []
    if name in _BANDS:
        low, high = _BANDS[name] if not values else (1 / values[0], values[0]) if len(values) == 1 else values[:2]
        if len(values) > 2 or low >= high:
            raise ConfigError(f"correction.reject: {text!r} has no band; write {name}=0.5_2.0 for example")
        return Rule(name, low, high)
    default = _BOUNDS[name]
    if len(values) > 1 or (not values and default is None):
        raise ConfigError(f"correction.reject: rule {name!r} takes one bound; write {name}=0.01 for example")
    bound = values[0] if values else float(default or 0.0)
    return Rule(name, bound, math.inf) if name == "veto" else Rule(name, -math.inf, bound)


def _number(rule: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"correction.reject: {rule!r} has the bound {text!r}, which is no number") from error
    if not 0 < value < math.inf:
        raise ConfigError(f"correction.reject: {rule!r} has the bound {text!r}; it must be positive and finite")
    return value


def kept(rule: Rule, seen: Seen) -> Tensor:
    """Which tokens pass a rule, bool ``(B, S)``; a rule about sequences keeps or drops all tokens of one.

    Raises:
        ConfigError: ``opsm`` without advantages.
    """
    if rule.name == "opsm":
        return _off_policy(rule, seen).expand_as(seen.mask)
    if rule.name == "veto":
        lowest = seen.log_ratio.masked_fill(~seen.mask, math.inf).amin(-1, keepdim=True)
        return (lowest >= math.log(rule.low)).expand_as(seen.mask)
    level, _, estimator = rule.name.rpartition("_")
    values = _ESTIMATORS[estimator](seen.log_ratio)
    if level != "token":
        values = _LEVELS[level](torch.where(seen.mask, values, 0.0), seen.mask)[:, None].expand_as(seen.mask)
    low, high = (math.log(rule.low), math.log(rule.high)) if estimator == "k1" else (-math.inf, rule.high)
    return (values >= low) & (values <= high)


def _off_policy(rule: Rule, seen: Seen) -> Tensor:
    if seen.advantages is None or seen.moved is None:
        raise ConfigError("rejection rule 'opsm' needs advantages and the current log-probs")
    moved = _mean(torch.where(seen.mask, seen.moved, 0.0), seen.mask)
    negative = (seen.advantages < 0).logical_and(seen.mask).any(-1)
    return ~(negative & (moved > rule.high))[:, None]


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(-1) / mask.sum(-1).clamp_min(1)


_ESTIMATORS = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
_LEVELS = {
    "seq_sum": lambda values, mask: values.sum(-1),
    "seq_mean": _mean,
    "seq_max": lambda values, mask: values.amax(-1),
}
