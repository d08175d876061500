"""`CodedLayout`: a block's tensors on a device, and on the host, with codes in place of some weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from rp_transfer import Layout

# Memory with codes is bytes, which tells it from that of a block of bf16 weights.
DTYPE = torch.uint8
# In bytes: of codes, of scales and of what else there is.
_ALIGNMENT = 64
_CODES, _SCALES = torch.float8_e4m3fn, torch.float32


class CodedWeight(NamedTuple):
    """A weight's `codes`, (rows, columns) in float8_e4m3fn, and `scales`, (rows, 1) in fp32."""

    codes: torch.Tensor
    scales: torch.Tensor


class Rest(NamedTuple):
    """Neighbouring tensors of a block that have no codes: elements [start, stop), and `place` in bytes."""

    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class CodedLayout:
    """Where codes, scales and the rest of a block are, in bytes: first all codes, which the host has in one piece.

    `indices`: the block's matrices in bf16 that have codes.

    >>> layout = Layout.of([torch.zeros(16, 32).bfloat16(), torch.zeros(16).bfloat16()])
    >>> coded = CodedLayout(layout, (0,))
    >>> layout.nbytes, coded.codes_nbytes, coded.nbytes
    (1056, 576, 640)
    """

    layout: Layout
    indices: tuple[int, ...]

    @cached_property
    def _offsets(self) -> tuple[dict[int, int], dict[int, int], int]:
        """Where each weight's codes and scales are, and where both end."""
        shapes = {index: self.layout.extents[index].shape for index in self.indices}
        codes, end = _placed({index: shape.numel() for index, shape in shapes.items()}, 0)
        scales, end = _placed({index: shape[0] * _SCALES.itemsize for index, shape in shapes.items()}, end)
        return codes, scales, end

    @property
    def codes_nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._offsets[2]

    @cached_property
    def rest(self) -> tuple[Rest, ...]:
        """The tensors without codes, joined with their neighbours."""
        found: list[Rest] = []
        place = self.codes_nbytes
        for start, stop in self._runs():
            found.append(Rest(start, stop, place))
            place = _aligned(place + (stop - start) * self.layout.dtype.itemsize)
        return tuple(found)

    def _runs(self) -> Iterator[tuple[int, int]]:
        filled = ((index in self.indices, span) for index, span in enumerate(self.layout.extents) if span.numel)
        for is_coded, found in groupby(filled, key=itemgetter(0)):
            spans = [span for _, span in found]
            if not is_coded:
                yield spans[0].offset, spans[-1].offset + spans[-1].numel

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all of it on a device."""
        size = self.layout.dtype.itemsize
        return max(
            (_aligned(one.place + (one.stop - one.start) * size) for one in self.rest), default=self.codes_nbytes
        )

    def weights(self, memory: torch.Tensor) -> dict[int, CodedWeight]:
        """View the codes and scales in `memory`: (bytes,), at least `codes_nbytes`."""
        codes, scales, end = self._offsets
        # Whole views first: one operation of torch for each tensor.
        as_codes, as_scales = memory[:end].view(_CODES), memory[:end].view(_SCALES)
        found: dict[int, CodedWeight] = {}
        for index in self.indices:
            rows, columns = self.layout.extents[index].shape
            at, scales_at = as_codes.storage_offset() + codes[index], as_scales.storage_offset()
            found[index] = CodedWeight(
                as_codes.as_strided((rows, columns), (columns, 1), at),
                as_scales.as_strided((rows, 1), (1, 1), scales_at + scales[index] // _SCALES.itemsize),
            )
        return found

    def others(self, memory: torch.Tensor) -> dict[int, torch.Tensor]:
        """View the tensors without codes in `memory`: (`nbytes`,)."""
        if not self.rest:
            return {i: self._empty(i, memory) for i in range(len(self.layout.extents)) if i not in self.indices}
        size, coded = self.layout.dtype.itemsize, set(self.indices)
        whole = memory.view(self.layout.dtype)
        return {
            index: self._empty(index, memory)
            if not span.numel
            else whole.as_strided(
                span.shape, span.stride, whole.storage_offset() + self._place(span.offset) // size
            )
            for index, span in enumerate(self.layout.extents)
            if index not in coded
        }

    def _empty(self, index: int, memory: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.layout.extents[index].shape, dtype=self.layout.dtype, device=memory.device)

    def _place(self, offset: int) -> int:
        """Return the byte at which an element of the block is on a device."""
        run = next(one for one in self.rest if one.start <= offset < one.stop)
        return run.place + (offset - run.start) * self.layout.dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _placed(sizes: dict[int, int], start: int) -> tuple[dict[int, int], int]:
    places: dict[int, int] = {}
    for index, nbytes in sizes.items():
        places[index] = start
        start = _aligned(start + nbytes)
    return places, start


def can_code(tensor: torch.Tensor) -> bool:
    """Return whether a weight can have codes.

    >>> can_code(torch.ones(2, 3).bfloat16()), can_code(torch.ones(6).bfloat16())
    (True, False)
    """
    return tensor.dtype == torch.bfloat16 and tensor.ndim == 2 and tensor.is_contiguous() and tensor.numel() > 0


def device_nbytes(layout: Layout, tensors: Sequence[torch.Tensor], coded: frozenset[int]) -> int:
    """Return the bytes of a block on a device where these weights travel as codes. `coded`: their ids."""
    indices = coded_indices(tensors, coded)
    return CodedLayout(layout, indices).nbytes if indices else layout.nbytes


def codes_nbytes(layout: Layout, tensors: Sequence[torch.Tensor], coded: frozenset[int]) -> int:
    """Return the bytes of the codes of a block's tensors. `coded`: the ids of those that are to have some."""
    return CodedLayout(layout, coded_indices(tensors, coded)).codes_nbytes


def coded_indices(tensors: Sequence[torch.Tensor], coded: frozenset[int]) -> tuple[int, ...]:
    """Return which of a block's tensors have codes. `coded`: the ids of those that are to have some."""
    return tuple(index for index, one in enumerate(tensors) if id(one) in coded and can_code(one))
