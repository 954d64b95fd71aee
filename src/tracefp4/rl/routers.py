"""The gate between a warm start and RL: is an upcycled policy a mixture of experts at all?

Copies of one dense MLP are no mixture: routes change nothing, so replaying them proves nothing. What upcycling and warm
start made of the copies is measured on the task's own text before RL is spent on it (:mod:`tracefp4.models.gate`).
"""

from __future__ import annotations

import torch
from torch import nn

from tracefp4.models.gate import RouterReport, router_gate
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.sft_data import gold_pairs
from tracefp4.rl.tasks import Task

ITEMS = 48
LEAST_BALANCE = 0.1
"""A task of one kind may use few experts; that alone is no fault."""


def check_routers(model: nn.Module, task: Task, prompter: Prompter, seed: object) -> RouterReport:
    """Refuse an upcycled policy whose experts or routes mean nothing, before RL is spent on it.

    Measured on the task's own prompts with their targets, and scored on the targets, which is what the warm start
    taught: a real gradient in every router, experts that differ, and a loss that rises when the routes of other tokens
    are replayed (:mod:`tracefp4.models.gate`).

    Args:
        model: not bound to sites.
        task: whose items have targets.
        prompter: renders them.
        seed: which items.

    Raises:
        ModelError: the model is no mixture of experts in this sense; the message says why.
        TaskError: an item without a target.
    """
    pairs = gold_pairs(task.items("train", ITEMS, seed), prompter)
    rows = [torch.tensor([*prompt, *completion]) for prompt, completion in pairs]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    device = next(model.parameters()).device
    prompts = torch.tensor([len(prompt) for prompt, _ in pairs])
    scored = torch.arange(tokens.shape[1]) >= prompts[:, None]
    lengths = torch.tensor([len(row) for row in rows])
    return router_gate(
        model, tokens.to(device), lengths=lengths.to(device), scored=scored.to(device), min_balance=LEAST_BALANCE
    )
