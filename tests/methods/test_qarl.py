"""The whole loss of QaRL by hand: trust band, weight of the mismatch and aggregation as one product."""

import math

import pytest
import torch

from tracefp4.config import parse
from tracefp4.methods import get_method
from tracefp4.rl.corrections import correction_weights
from tracefp4.rl.losses import Denominators, policy_loss

NAN = math.nan

# One response a line: advantage, log p_old - log q of its tokens, log p - log p_old of its tokens.
RESPONSES = [
    # r = e^0.0002 lies inside [1 - 3e-4, 1 + 4e-4]; single tokens are far outside both bands, their means are not.
    (1.0, [1.0, -0.9], [0.3002, -0.2998]),
    # A < 0 inside: pushed down with weight w = e^-0.3.
    (-2.0, [-0.3, -0.3, -0.3], [-0.0001, -0.0001, -0.0001]),
    # A < 0 above the clip range: PPO would push it down, the trust band leaves it alone.
    (-1.0, [0.1, 0.1], [0.01, 0.01]),
    # A < 0 below: already pushed out.
    (-1.0, [0.0], [-0.01]),
    # A > 0 above: PPO stops it. A > 0 below: it may come back.
    (1.5, [0.2, 0.4], [0.005, 0.005]),
    (1.5, [0.2], [-0.005]),
    # w = e^0.8 = 2.2 and e^-0.75 = 0.47 lie outside [0.5, 2]: weight 0, but counted among the sequences.
    (1.0, [0.9, 0.7], [0.0, 0.0]),
    (-1.0, [-0.75], [0.0]),
]
# By response: loss of each of its tokens, and its derivative by the token's log-prob (-A w r, or 0).
W = [math.exp(0.05), math.exp(-0.3), math.exp(0.1), 1.0, math.exp(0.3), math.exp(0.2), 0.0, 0.0]
R = [math.exp(0.0002), math.exp(-0.0001), math.exp(0.01), math.exp(-0.01), math.exp(0.005), math.exp(-0.005), 1.0, 1.0]
LOSSES = [
    -W[0] * R[0],
    2 * W[1] * R[1],
    W[2] * R[2],
    W[3] * (1 - 3e-4),
    -1.5 * W[4] * (1 + 4e-4),
    -1.5 * W[5] * R[5],
    0.0,
    0.0,
]
SLOPES = [-W[0] * R[0], 2 * W[1] * R[1], 0.0, 0.0, 0.0, -1.5 * W[5] * R[5], 0.0, 0.0]


def padded(column, rows, width=3):
    return torch.tensor([[*row[column], *[NAN] * (width - len(row[column]))] for row in rows])


def terms(rows):
    """Loss and gradient of some of the responses, as the trainer puts them together."""
    config = get_method("qarl").settings(parse({"method": "qarl"}))
    rollout = torch.full((len(rows), 3), -1.0)
    old = rollout + padded(1, rows)
    logprobs = (old + padded(2, rows)).requires_grad_()
    mask = ~old.isnan()
    advantages = torch.tensor([row[0] for row in rows])
    weights, stats = correction_weights(old, rollout, mask, config.correction)
    denominators = Denominators.of([len(row[1]) for row in RESPONSES])
    loss, clipped = policy_loss(logprobs, old, advantages, mask, denominators, config.loss, weights=weights)
    loss.backward()
    return loss.item(), logprobs.grad, mask, stats, clipped


def test_the_whole_loss_by_hand():
    loss, gradient, mask, stats, clipped = terms(RESPONSES)
    count = len(RESPONSES)
    assert loss == pytest.approx(sum(LOSSES) / count, rel=1e-5)
    expected = torch.zeros(count, 3)
    for row, (_, mismatch, _) in enumerate(RESPONSES):
        expected[row, : len(mismatch)] = SLOPES[row] / len(mismatch) / count
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-8)
    assert stats.rejected == 3 and mask.sum() == 14
    # Tokens that were left alone: below (1), above with A > 0 (2), above with A < 0 (2).
    assert (clipped.clip_low, clipped.clip_high, clipped.clip_dual) == (1, 2, 2)


def test_micro_batches_add_up_to_it():
    parts = [terms(RESPONSES[:3])[0], terms(RESPONSES[3:])[0]]
    assert sum(parts) == pytest.approx(terms(RESPONSES)[0], rel=1e-6)
