"""What a run is, in the lines that it prints before it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tracefp4.guidance.sizes import bytes_per_token
from tracefp4.models.coverage import compare, render

if TYPE_CHECKING:
    from tracefp4.rl.run import Run


def describe_run(run: Run, say: Callable[[str], None]) -> None:
    """Say what a run is: the policy, both sides' coverage, and whether they agree.

    Args:
        run: built, not started.
        say: called with each line.

    Raises:
        CoverageError: a site was missed, or a method that quantizes both sides alike does not.
    """
    theirs = run.engine.coverage()
    mine = run.trainer_coverage()
    loss, correction = run.config.loss, run.config.correction
    processes = f", {run.ranks.size} processes" if run.ranks.size > 1 else ""
    say(f"policy {run.config.policy} on {run.device}{processes}; method {run.method.name}")
    weighing = f"{correction.level} {correction.name}{f', {correction.reject}' if correction.reject else ''}"
    say(f"loss {loss.name}{' with score centering' if loss.score_centering else ''}; correction {weighing}")
    say(f"warm start {run.start.name}")
    for key, value in run.source.items():
        say(f"  {key}: {value}")
    say(f"rollout: {render(theirs)}")
    if run.rollout_spec.hash == run.trainer_spec.hash:
        compare(theirs, mine)
        say("trainer: the same, checked module by module")
    else:
        say(f"trainer: {render(mine)}")
    if run.plan is not None:
        size = bytes_per_token(run.plan, run.guided_shapes, run.layout.num_layers)
        text = f"guidance {run.plan}: {size:.0f} B a token{' and what is pulled' if run.plan.checked else ''}"
        if run.budget is not None:
            text += f"; every {run.config.train.replan_every} steps a plan of {run.budget} B is chosen from it"
        say(text)
