"""Views of a model's gradient blocks in ``.grad`` of its parameters, between calls."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rp_optim.masters import own_grad

from rp_state.block import Block
from rp_state.gradient import Gradient


class Exposure:
    """Sets each parameter's ``.grad`` to its view of the gradient block, and removes it again.

    Makes no copy, except of a gradient in two blocks, which are summed into one."""

    def __init__(self) -> None:
        self._shown: list[tuple[Gradient, int, torch.Tensor, torch.Tensor | None]] = []

    def show(self, blocks: Iterable[Block]) -> None:
        """Set ``.grad`` on every trainable parameter; no task may be running."""
        for block in blocks:
            written = block.gradient.written
            for index, parameter in enumerate(block.tensors):
                self._show(block.gradient, index, parameter, is_written=index in written)

    def _show(self, gradient: Gradient, index: int, parameter: torch.Tensor, *, is_written: bool) -> None:
        view = gradient.view(index) if is_written else None
        if view is not None:
            parameter.grad_dtype = view.dtype
        parameter.grad = view
        self._shown.append((gradient, index, parameter, view))

    def take_back(self) -> None:
        """Remove ``.grad`` from the parameters; keep what the user changed, replaced or dropped there."""
        moved: list[tuple[Gradient, int, torch.Tensor]] = []
        for gradient, index, parameter, view in self._shown:
            if (now := own_grad(parameter)) is None:
                gradient.drop((index,))
            elif now is not view:
                # It may be a view of another parameter's gradient: read all before writing any.
                moved.append((gradient, index, now.clone()))
            parameter.grad = None
        for gradient, index, value in moved:
            gradient.put(index, value)
        self._shown = []
