"""From rewards to advantages: how much better was a sample than the other samples of its prompt?

GRPO (Shao et al., arXiv 2402.03300, section 4.1) needs no value network. It samples a *group* of responses to one
prompt and takes each reward relative to its group,

    A = (R - mean(group)) / (std(group) + 1e-6),

with the unbiased standard deviation; the same number then stands at every token of the response. Dr. GRPO (Liu et al.,
arXiv 2503.20783) leaves the division out, because it makes prompts on which the policy nearly always or nearly never
succeeds weigh more: ``norm_std=False``.

A group whose rewards are all equal has no advantage and trains nothing; DAPO (Yu et al., arXiv 2503.14476, section 3.2)
drops it. So does ``filter_groups``, and the number of dropped samples is reported. DAPO's *soft overlong punishment*
(section 3.4) subtracts up to 1 from the reward of a response that comes close to the length limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracefp4.errors import ConfigError, TaskError

EPS = 1e-6
"""Added to the standard deviation, as in verl's GRPO."""


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What became of the groups of a batch."""

    groups: int
    equal: int
    """Groups of two or more samples whose rewards are all equal."""
    single: int
    """Groups of one sample: nothing to compare with, so the advantage is 0."""
    samples: int
    dropped: int
    """Samples that are not trained on."""
    overlong: int
    """Samples whose reward the overlong penalty lowered."""

    def metrics(self) -> dict[str, float]:
        """Scalars for the journal."""
        return {
            "groups/total": float(self.groups),
            "groups/equal": float(self.equal),
            "groups/single": float(self.single),
            "samples/total": float(self.samples),
            "samples/dropped": float(self.dropped),
            "samples/overlong": float(self.overlong),
        }


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch.

    ``values`` is ``(B,)`` float32, one number a sample; ``rewards`` is ``(B,)`` float32 after the overlong penalty;
    ``keep`` is ``(B,)`` bool, false for samples that train nothing.
    """

    values: Tensor
    rewards: Tensor
    keep: Tensor
    counts: GroupCounts


def compute_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    norm_std: bool = True,
    filter_groups: bool = True,
    lengths: Tensor | None = None,
    overlong_buffer: int = 0,
    max_length: int = 0,
) -> Advantages:
    """Advantages of a whole rollout batch. The batch is small, so this runs on the CPU in float64.

    Args:
        rewards: ``(B,)`` finite numbers.
        groups: ``(B,)`` integers; samples with the same number answer the same prompt. Groups may differ in size.
        norm_std: divide by the group's standard deviation (off: Dr. GRPO).
        filter_groups: mark samples of groups without a spread of rewards as not to be trained on.
        lengths: ``(B,)`` response tokens; needed for the overlong penalty only.
        overlong_buffer: tokens before ``max_length`` over which the penalty grows from 0 to 1; 0 is off.
        max_length: response length limit.

    Raises:
        TaskError: shapes differ, or a reward is not finite.
        ConfigError: an overlong buffer without lengths, or longer than the limit.
    """
    values = rewards.detach().cpu().to(torch.float64)
    ids = groups.detach().cpu()
    if values.ndim != 1 or values.shape != ids.shape or not len(values):
        raise TaskError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be two equal vectors")
    bad = torch.nonzero(~values.isfinite())
    if len(bad):
        raise TaskError(f"the reward of sample {int(bad[0])} is {float(values[bad[0]])}, not a finite number")
    overlong = 0
    if overlong_buffer:
        if lengths is None or lengths.shape != rewards.shape:
            raise ConfigError("an overlong penalty needs the length of every response")
        penalty = overlong_penalty(lengths.detach().cpu(), max_length, overlong_buffer)
        overlong = int((penalty < 0).sum())
        values = values + penalty.to(torch.float64)
    advantages, equal, sizes, index = _group_advantages(values, ids, norm_std)
    trains_nothing = equal[index]
    keep = ~trains_nothing if filter_groups else torch.ones_like(trains_nothing)
    counts = GroupCounts(
        groups=len(sizes),
        equal=int((equal & (sizes > 1)).sum()),
        single=int((sizes == 1).sum()),
        samples=len(values),
        dropped=int((~keep).sum()),
        overlong=overlong,
    )
    return Advantages(advantages.float(), values.float(), keep, counts)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment: 0 up to ``max_length - buffer`` tokens, then linear to -1 at ``max_length``.

    Args:
        lengths: ``(B,)`` response tokens.
        max_length: response length limit.
        buffer: tokens over which the penalty grows.

    Returns:
        ``(B,)`` float32 in ``[-1, 0]``, to be added to the reward.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(f"an overlong buffer of {buffer} tokens does not fit a length limit of {max_length}")
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def _group_advantages(values: Tensor, ids: Tensor, norm_std: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, index = torch.unique(ids, return_inverse=True)
    count = int(index.max()) + 1
    zeros = torch.zeros(count, dtype=torch.float64)
    sizes = zeros.scatter_add(0, index, torch.ones_like(values))
    mean = zeros.scatter_add(0, index, values) / sizes
    centred = values - mean[index]
    low = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    # Compared, not inferred from the mean: eight rewards of 0.1 have a mean that is not 0.1, and dividing the remainder
    # by a standard deviation near 0 would make an advantage out of rounding.
    equal = low == high
    centred = torch.where(equal[index], 0.0, centred)
    if norm_std:
        variance = zeros.scatter_add(0, index, centred.square()) / (sizes - 1).clamp_min(1)
        centred = centred / (variance.sqrt() + EPS)[index]
    return centred, equal, sizes, index
