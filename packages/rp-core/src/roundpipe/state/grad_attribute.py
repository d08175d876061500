"""Gradients shown on the model's own parameters between calls, and taken back with what the user did to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from roundpipe.state.gradient import Gradient
from roundpipe.state.model_state import Block


class Exposure:
    """After ``synchronize()`` each parameter's ``.grad`` is its part of the gradient block; nothing is copied."""

    def __init__(self) -> None:
        self._shown: list[tuple[Gradient, int, torch.Tensor, torch.Tensor | None]] = []

    def show(self, blocks: Iterable[Block]) -> None:
        """Set ``.grad`` on every trainable parameter; no task may be running."""
        for block in blocks:
            if block.gradient is not None:
                for index, parameter in enumerate(block.tensors):
                    self._show(block.gradient, index, parameter)

    def _show(self, gradient: Gradient, index: int, parameter: torch.Tensor) -> None:
        view = gradient.view(index) if index in gradient.written else None
        if view is not None:
            parameter.grad_dtype = view.dtype
        parameter.grad = view
        self._shown.append((gradient, index, parameter, view))

    def take_back(self) -> None:
        """Take ``.grad`` off the parameters; what was changed, replaced or dropped there counts from now on."""
        moved: list[tuple[Gradient, int, torch.Tensor]] = []
        for gradient, index, parameter, view in self._shown:
            if parameter.grad is None:
                gradient.drop((index,))
            elif parameter.grad is not view:
                # Perhaps another parameter's gradient: nothing is written before all has been read.
                moved.append((gradient, index, parameter.grad.clone()))
            parameter.grad = None
        for gradient, index, value in moved:
            gradient.put(index, value)
        self._shown = []
