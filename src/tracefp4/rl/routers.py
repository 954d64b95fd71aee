"""The gate between a warm start and RL: is an upcycled policy a mixture of experts at all?

Copies of one dense MLP are no mixture: routes change nothing, so replaying them proves nothing. What upcycling and warm
start made of the copies is measured on the task's own text before RL is spent on it (:mod:`tracefp4.models.gate`).
"""

from __future__ import annotations

import torch
from torch import nn

from tracefp4.errors import TaskError
from tracefp4.models.gate import RouterReport, router_gate
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.sft_data import gold_pairs
from tracefp4.rl.tasks import Task

ITEMS, WIDTH = 48, 64
LEAST_BALANCE = 0.1
"""A task of one kind may use few experts; that alone is no fault."""


def check_routers(model: nn.Module, task: Task, prompter: Prompter, seed: object) -> RouterReport:
    """Refuse an upcycled policy whose experts or routes mean nothing, before RL is spent on it.

    Measured on the task's own prompts and targets, 64 tokens a row: a real gradient in every router, experts that
    differ, and a loss that rises when the routes of other tokens are replayed (:mod:`tracefp4.models.gate`).

    Args:
        model: not bound to sites.
        task: whose items have targets.
        prompter: renders them.
        seed: which items.

    Raises:
        ModelError: the model is no mixture of experts in this sense; the message says why.
        TaskError: the items have too little text to measure on.
    """
    pairs = gold_pairs(task.items("train", ITEMS, seed), prompter)
    ids = [token for prompt, completion in pairs for token in (*prompt, *completion)]
    rows = len(ids) // WIDTH
    if rows == 0:
        raise TaskError(f"{ITEMS} items of task {task.name!r} have only {len(ids)} tokens, {WIDTH} are needed")
    device = next(model.parameters()).device
    tokens = torch.tensor(ids[: rows * WIDTH], device=device).view(rows, WIDTH)
    return router_gate(model, tokens, min_balance=LEAST_BALANCE)
