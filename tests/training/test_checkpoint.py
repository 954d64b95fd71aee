"""Checkpoints exist whole or not at all, and an altered one is refused by name."""

import pytest
import torch

from tracefp4.errors import CheckpointError
from tracefp4.training import checkpoint
from tracefp4.training.checkpoint import TrainState


def _save(root, step, keep=2):
    model = {"w": torch.arange(6.0).bfloat16().view(2, 3)}
    optimizer = {"master.w": torch.arange(6.0).view(2, 3), "step.w": torch.tensor(3.0)}
    return checkpoint.save(root, model, optimizer, TrainState(step, step + 1, step, "abc"), keep)


def test_round_trip_and_retention(tmp_path):
    for step in (1, 2, 3):
        folder = _save(tmp_path, step)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000002", "step-000003"]
    model, optimizer, state = checkpoint.load(folder)
    assert torch.equal(model["w"], torch.arange(6.0).bfloat16().view(2, 3))
    assert optimizer["step.w"].item() == 3
    assert state == TrainState(3, 4, 3, "abc")


def test_interrupted_checkpoint_does_not_count(tmp_path):
    folder = _save(tmp_path, 1)
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000002" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.complete(tmp_path) == [folder]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_flipped_bit_missing_and_truncated_files_are_named(tmp_path, name):
    folder = _save(tmp_path, 1)
    file = folder / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} was altered"):
        checkpoint.load(folder)
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has"):
        checkpoint.load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        checkpoint.load(folder)
