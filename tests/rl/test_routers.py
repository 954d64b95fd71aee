"""The gate before RL: a mixture passes, copies do not, and an upcycled policy meets it after its warm start."""

import pytest
import torch

from tracefp4.config import TaskConfig
from tracefp4.errors import ModelError
from tracefp4.models.loading import load_model
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.routers import check_routers
from tracefp4.rl.tasks import make_task

TASK = TaskConfig(name="chain_sum", options={"template": "{expression}=", "extract": "whole"})


@pytest.fixture
def parts():
    task = make_task(TASK)
    loaded = load_model("tiny-moe")
    yield loaded.model, task, Prompter(loaded.tokenizer, TASK)
    task.close()


def test_copies_of_one_expert_are_refused(parts):
    model, task, prompter = parts
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name:
                p.copy_(p[:1].expand_as(p))
    with pytest.raises(ModelError, match="identical experts are no MoE"):
        check_routers(model, task, prompter, 0)


def test_routes_without_meaning_are_refused(parts):
    # An untrained model: its experts differ, but which one serves a token says nothing about the token.
    model, task, prompter = parts
    with pytest.raises(ModelError, match="routes carry no information"):
        check_routers(model, task, prompter, 0)
