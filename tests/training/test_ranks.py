"""What processes that train together exchange, and how they part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracefp4.errors import TrainingError
from tracefp4.training.ranks import ALONE, Ranks

WORKER = """
import json, os, sys
import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tracefp4.errors import TrainingError
from tracefp4.training.ranks import joined

threads = lambda: len(os.listdir("/proc/self/task"))
found = {}
with joined() as ranks:
    # Sharded tensors leave the default group behind in caches of PyTorch.
    layer = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    layer(torch.randn(2, 8)).sum().backward()
    found["texts"] = ranks.gather({"rank": ranks.rank, "text": "x" * 10 ** ranks.rank})
    found["array"] = ranks.gather_array(np.arange(ranks.rank + 1)).tolist()
    found["sum"] = ranks.sum([1.5, ranks.rank])
    found["merged"] = ranks.merge({"both": 1, str(ranks.rank): 2})
    found["most"], found["any"] = ranks.most(ranks.rank), ranks.any(ranks.rank == 1)
    found["during"] = threads()
found["after"] = threads()
try:
    ranks.gather(1)
except TrainingError as error:
    found["error"] = str(error)
open(f"{sys.argv[1]}/{ranks.rank}.json", "w").write(json.dumps(found))
"""


@pytest.mark.timeout(300)  # Processes that import everything, on a machine that may be busy.
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux tells them")
def test_two_ranks_exchange_and_leave_no_thread_that_hands_tensors_back(tmp_path: Path) -> None:
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["texts"] == [{"rank": 0, "text": "x"}, {"rank": 1, "text": "x" * 10}]
        assert found["array"] == [0.0, 0.0, 1.0] and found["sum"] == [3.0, 1.0]
        assert found["merged"] == {"both": 2.0, "0": 2.0, "1": 2.0} and found["most"] == 1 and found["any"]
        # The threads of their own group: one that interpreters do not wait for may abort a process at its end.
        assert found["after"] <= found["during"] - 2
        assert "no longer" in found["error"]


def test_one_process_waits_for_nobody_and_several_must_be_joined() -> None:
    assert ALONE.gather([1.5, None]) == [[1.5, None]] and ALONE.sum([2.0]) == [2.0]
    with pytest.raises(TrainingError, match="rank 1 of 2 is not joined"):
        Ranks(1, 2).gather(1)
