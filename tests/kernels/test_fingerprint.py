"""A fingerprint is the same number with the kernel and without."""

from __future__ import annotations

import pytest
import torch

from tracefp4.models.fingerprint import fingerprint
from tracefp4.models.packing import digest


@pytest.mark.parametrize("size", [0, 1, 3, 4096, 65535, 65536, 65537, 150_001])
def test_equals_the_plain_code(size, device, monkeypatch):
    x = torch.randint(-(2**31), 2**31 - 1, (size,), generator=torch.Generator().manual_seed(size)).to(torch.int32)
    found = int(fingerprint(x.to(device)))
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    assert found == int(fingerprint(x))


def test_bytes_beyond_the_last_word_and_views(device, monkeypatch):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    parts = (x, x.t(), x.view(torch.uint8)[1:, 3:8], x[0, :1], x[2:2])
    found = [int(fingerprint(part)) for part in (p.to(device) for p in parts)]
    there = digest({"a": parts, "b": (x.to(device),)}) if device.type == "cuda" else digest({"a": parts, "b": (x,)})
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    assert found == [int(fingerprint(part)) for part in parts]
    assert there == digest({"a": parts, "b": (x,)})


def test_slabs_are_joined_by_horners_rule(device, monkeypatch):
    """Small slabs, so that there are several; keys are made before, because they are kept."""
    for where in {device, torch.device("cpu")}:
        fingerprint(torch.zeros(1, device=where))
    monkeypatch.setattr("tracefp4.models.fingerprint._TILES", 2)
    x = torch.randint(-(2**31), 2**31 - 1, (327_757,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    found = int(fingerprint(x.to(device)))
    monkeypatch.setenv("TRACEFP4_KERNELS", "reference")
    assert found == int(fingerprint(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_than_a_slab_on_a_device():
    x = torch.randint(-(2**31), 2**31 - 1, ((1 << 25) + 12345,), dtype=torch.int32)
    assert int(fingerprint(x.cuda())) == int(fingerprint(x))
