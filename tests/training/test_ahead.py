"""Micro-batches made ahead: the same ones in order, one in advance, errors where they belong."""

import threading

import pytest
import torch

from tracefp4.core import TopLogprobs
from tracefp4.training.ahead import ahead, tensors_in
from tracefp4.training.batch import Example, collate

CPU = torch.device("cpu")


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_results_come_in_order(count, threaded):
    assert list(ahead([lambda i=i: i for i in range(count)], CPU, threaded=threaded)) == list(range(count))


def test_the_next_one_is_made_while_this_one_is_used():
    made = [threading.Event() for _ in range(3)]
    for index, _ in enumerate(ahead([event.set for event in made], CPU, threaded=True)):
        if index < 2:
            assert made[index + 1].wait(20)
        assert not any(event.is_set() for event in made[index + 2 :])


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_comes_in_its_place(threaded):
    def fail():
        raise ValueError("no frame")

    seen = []
    with pytest.raises(ValueError, match="no frame"):
        for value in ahead([lambda: 1, fail, lambda: 3], CPU, threaded=threaded):
            seen.append(value)
    assert seen == [1]


def test_a_caller_that_stops_leaves_no_thread_behind():
    before = threading.active_count()
    made = []
    for _ in ahead([lambda i=i: made.append(i) for i in range(50)], CPU, threaded=True):
        break
    assert len(made) <= 3
    assert threading.active_count() == before


def test_every_tensor_of_a_micro_batch_is_found():
    top = TopLogprobs(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2))
    batch = collate([Example((1, 2, 3, 4), 1, routes=torch.zeros(3, 1, 2), top=top)], CPU)
    found = [tensor.data_ptr() for tensor in tensors_in(batch)]
    assert batch.routes is not None and batch.top is not None
    for tensor in (batch.input_ids, batch.real, batch.places, batch.routes.experts, batch.top.ids):
        assert tensor.data_ptr() in found
    nested = {"a": [batch, (torch.ones(1),)]}
    assert len(list(tensors_in(nested))) == len(found) + 1
