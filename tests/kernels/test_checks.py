"""Checks by kernel equal those of the plain code, for any size, mask and alignment; so do the counts of failures."""

from __future__ import annotations

import pytest
import torch

from tracefp4.guidance import codec
from tracefp4.kernels.runtime import SWITCH

pytestmark = pytest.mark.usefixtures("plain_code")


def made(batch, rows, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (batch, rows, size), dtype=torch.uint8, generator=generator)
    valid = torch.rand(batch, rows, generator=generator) < 0.7
    valid[-1, rows // 2 :] = False
    return data, valid


def keys(size, device):
    return codec.check_keys(-(-size // 4)).to(device)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 16, 4), (3, 37, 36), (2, 33, 7), (1, 18, 192), (2, 20, 390)])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_plain_code(shape, masked, device):
    from tracefp4.kernels import checks

    data, valid = made(*shape)
    mask = valid if masked else None
    there, mask_there = data.to(device), mask if mask is None else mask.to(device)
    for each, plain in ((False, codec.scale_checks), (True, codec.code_checks)):
        found = checks.checks(there, mask_there, keys(shape[2], device), each=each)
        assert torch.equal(found.cpu(), plain(data, mask))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_masks_of_all_shapes(lead, device, monkeypatch):
    data = made(6, 21, 10)[0].view(2, 3, 21, 10)[(0,) * (2 - len(lead))]
    masks = [None, torch.rand(21) < 0.6, torch.rand(*lead, 21) < 0.6]
    expected = [(codec.scale_checks(data, mask), codec.code_checks(data, mask)) for mask in masks]
    monkeypatch.delenv(SWITCH)
    for mask, parts in zip(masks, expected, strict=True):
        there = mask if mask is None else mask.to(device)
        for plain, make in zip(parts, (codec.scale_checks, codec.code_checks), strict=True):
            found = make(data.to(device), there)
            assert found.shape == plain.shape and torch.equal(found.cpu(), plain)


def test_data_that_is_not_aligned_to_words(device):
    from tracefp4.kernels import checks

    data, _ = made(1, 40, 12)
    flat = torch.cat((torch.zeros(1, dtype=torch.uint8), data.flatten())).to(device)
    found = checks.checks(flat[1:].view(1, 40, 12), None, keys(12, device), each=False)
    assert torch.equal(found.cpu(), codec.scale_checks(data))


@pytest.mark.parametrize("shape", [(3, 37, 36), (2, 64, 7)])
@pytest.mark.parametrize("sites", [1, 8, 11])
def test_failures_are_counted(shape, sites, device):
    from tracefp4.kernels import checks

    parts, wanted = [], []
    valid = made(*shape)[1]
    valid[1, 17] = True
    for site in range(sites):
        parts.append(made(*shape, seed=site)[0])
        wanted.append(codec.scale_checks(parts[-1], valid))
        if site % 3 == 0:
            wanted[-1][0, 0] += 1
            parts[-1][1, 17] ^= 1
    plain = torch.tensor([5, 7])
    codec.count_failures(plain, parts, valid, wanted)
    totals = torch.tensor([5, 7], device=device)
    there, expected = ([t.to(device) for t in group] for group in (parts, wanted))
    checks.count(totals, there, valid.to(device), keys(shape[2], device), expected)
    assert totals.tolist() == plain.tolist()
    assert plain[0] > 5 and plain[1] == 7 + 2 * -(-sites // 3)


def test_nothing_to_check(device):
    from tracefp4.kernels import checks

    no_tokens = torch.zeros(2, 0, 4, dtype=torch.uint8, device=device)
    assert checks.checks(no_tokens, None, keys(4, device), each=False).shape == (2, 0)
    no_bytes = torch.zeros(1, 3, 0, dtype=torch.uint8, device=device)
    assert checks.checks(no_bytes, None, keys(0, device), each=True).tolist() == [[0, 0, 0]]
