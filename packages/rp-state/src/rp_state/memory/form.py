"""The forms that a block has on a device: its tensors, or codes in place of some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from rp_transfer import Layout

from rp_state.codes.layout import DTYPE, CodedWeight
from rp_state.codes.published import PublishedCodes
from rp_state.memory.host_tensors import HostTensors


class Form(Protocol):
    """A block's memory on a device: (`numel`,) of `dtype`."""

    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def pieces(self, host: HostTensors, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (slice of `target`, host tensor) that together copy the block. `target`: in this form."""
        ...

    def views(self, memory: torch.Tensor) -> Sequence[torch.Tensor | CodedWeight]:
        """View all tensors in memory of this form; weights with codes as these."""
        ...


class PlainForm:
    """The tensors as they are: see `Form`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.numel, self.dtype = layout.numel, layout.dtype

    def pieces(self, host: HostTensors, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """All."""
        return host.pieces(target)

    def views(self, memory: torch.Tensor) -> Sequence[torch.Tensor | CodedWeight]:
        """View them."""
        return self._layout.views(memory)


class CodedForm:
    """Codes in place of the weights that have some, and the other tensors: see `Form`."""

    dtype = DTYPE

    def __init__(self, codes: PublishedCodes) -> None:
        self._codes = codes
        self.numel = codes.layout.nbytes

    def pieces(self, host: HostTensors, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """First all codes, then what has none."""
        yield target[: self._codes.layout.codes_nbytes], self._codes.memory
        yield from host.pieces_beside(self._codes.layout, target)

    def views(self, memory: torch.Tensor) -> Sequence[torch.Tensor | CodedWeight]:
        """View codes and tensors, in the block's order."""
        found = {**self._codes.layout.weights(memory), **self._codes.layout.others(memory)}
        return [found[index] for index in range(len(found))]
