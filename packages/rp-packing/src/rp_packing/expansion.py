"""Expand packed weights on a device for one layer at a time, in forward and again in backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rp_packing.rows import Rows
from rp_packing.weight import PackedWeight, expand


class PackedTwin:
    """A packed weight of the host, and its copy on a device.

    `parameter`: the ordinary frozen parameter that the layer reads; empty unless its layer is the expanded one.
    `codes` and `scales` are bound to the task's blocks.
    """

    def __init__(
        self, weight: PackedWeight, codes: torch.Tensor, scales: torch.Tensor, device: torch.device
    ) -> None:
        # Keeps the host's weight alive, so that no other object gets its id.
        self._weight = weight
        self._codes = codes
        self._scales = scales
        self._nothing = torch.empty(0, dtype=weight.dtype, device=device)
        self.parameter = torch.nn.Parameter(self._nothing, requires_grad=False)

    def expand(self) -> torch.Tensor:
        """Return the weight in new memory on the device."""
        return expand(self._weight, self._codes, self._scales)

    def row_codes(self) -> Rows | None:
        """Return codes and scales as products in FP8 read them, in the bound memory; None for other formats."""
        if self._weight.format.name != "fp8-rows" or self._weight.ndim != 2:
            return None
        return Rows(self._codes.view(torch.float8_e4m3fn), self._scales.unsqueeze(-1))

    def fill(self, expanded: torch.Tensor) -> None:
        """Set the parameter to the expanded weight."""
        self.parameter.data = expanded

    def empty(self) -> None:
        """Set the parameter to empty memory."""
        self.parameter.data = self._nothing


@dataclass(frozen=True, slots=True)
class _Saved:
    """The note that autograd keeps in place of an expanded weight, or of a view of one."""

    layer: int
    weight: PackedTwin
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Expansions:
    """The expanded weights of the layer that ran last on the device; used by the device's thread only.

    Autograd keeps a note in place of each view of a weight, and the weights are expanded again when
    backward reaches the layer.
    """

    def __init__(self) -> None:
        self._layer: int | None = None
        self._expanded: dict[PackedTwin, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self._expanded.values())

    def forget(self) -> None:
        """Free the expanded weights."""
        for weight in self._expanded:
            weight.empty()
        self._expanded = {}
        self._layer = None

    @contextmanager
    def of(self, layer: int, weights: Sequence[PackedTwin]) -> Generator[None]:
        """Expand a layer's weights for a forward. They stay until another layer's are expanded, or `forget`."""
        if not weights:
            yield
            return
        self._fill(layer, weights)
        with torch.autograd.graph.saved_tensors_hooks(self._noting(layer, weights), self._again):
            yield

    def enter_backward(self, layer: int, weights: Sequence[PackedTwin]) -> None:
        """Expand a layer's weights for its backward, which may run parts of its forward again.

        Does nothing if backward is already below that layer, whose output may have skipped other layers.
        """
        if weights and (self._layer is None or layer <= self._layer):
            self._fill(layer, weights)

    def includes(self, leaf: Any) -> bool:
        """Return whether a leaf of a layer's output is one of the expanded weights itself."""
        return any(weight.parameter is leaf for weight in self._expanded)

    def _fill(self, layer: int, weights: Sequence[PackedTwin]) -> None:
        for weight in weights:
            weight.fill(self._get(layer, weight))

    def _get(self, layer: int, weight: PackedTwin) -> torch.Tensor:
        if layer != self._layer:
            self.forget()
            self._layer = layer
        if weight not in self._expanded:
            self._expanded[weight] = weight.expand()
        return self._expanded[weight]

    def _noting(
        self, layer: int, weights: Sequence[PackedTwin]
    ) -> Callable[[torch.Tensor], torch.Tensor | _Saved]:
        places = {_place(self._expanded[weight]): weight for weight in weights}

        def note(tensor: torch.Tensor) -> torch.Tensor | _Saved:
            weight = None if tensor.layout != torch.strided else places.get(_place(tensor))
            if weight is None or tensor.dtype != weight.parameter.dtype:
                # Without its graph: a graph that keeps its own output would never be freed.
                return tensor.detach()
            return _Saved(layer, weight, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        return note

    def _again(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        expanded = self._get(saved.layer, saved.weight)
        return expanded.as_strided(saved.shape, saved.stride, saved.offset)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
