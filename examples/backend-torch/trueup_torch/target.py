"""Tensors as managed memory: states are replaced, never written to. Holds no op."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trueup.core.backend import Capabilities, Device, ManagedTarget
from trueup.core.backend.managed import ManagedMemory
from trueup.core.graph import State

from .table import kernels


class TorchMemory(ManagedMemory):
    """Tensors on one device."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def array(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array, order="C")).to(self.place)

    def numpy(self, value: Tensor) -> NDArray[Any]:
        return np.array(value.cpu().numpy(), order="C")

    def set_rows(self, value: Tensor, rows: NDArray[np.intp], part: Any) -> Tensor:
        out = value.clone()
        out[self._index(rows)] = part
        return out

    def take_rows(self, value: Tensor, rows: NDArray[np.intp]) -> Tensor:
        return value[self._index(rows)]

    def _index(self, rows: NDArray[np.intp]) -> Tensor:
        return torch.from_numpy(rows).to(self.place)


class TorchTarget(ManagedTarget):
    """The table of kernels on one device. Equal bits run to run are claimed for the CPU alone."""

    memory: TorchMemory

    def __init__(self, device: Device, place: torch.device) -> None:
        super().__init__("torch", device, kernels, TorchMemory(place))
        self.capabilities = Capabilities(deterministic=place.type == "cpu")

    def set_region(self, root: Tensor, state: State, part: Tensor) -> Tensor:
        out = root.clone()
        state.slice(out).copy_(part)
        return out
