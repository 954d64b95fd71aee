"""Small integers on their way to the device, for which the host does not wait.

A copy from ordinary memory makes the host wait for everything that was launched before it, a decode step in flight
among it. So they are written to pinned memory first, of which PyTorch keeps what was used and copied.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """``values``, which nobody changes any more, as a tensor on ``device``."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
