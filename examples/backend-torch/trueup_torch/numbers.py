"""What kernels compute in: float64 where the device has it, rounded to float32 once."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def narrow(x: Tensor) -> Tensor:
    return x.to(torch.float32)
