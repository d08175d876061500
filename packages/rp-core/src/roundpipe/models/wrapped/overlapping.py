"""Refuses weights that are several tensors in the same memory: on devices and in steps each would be by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn


class _Span(NamedTuple):
    """Where the elements of a tensor lie: from its first byte to behind its last one."""

    start: int
    stop: int
    name: str
    tensor: torch.Tensor


def refuse_overlapping(model: nn.Module) -> None:
    """Raise `ValueError` for a trained parameter of which another parameter or a buffer has some of the memory.

    >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> second.weight.data = first.weight.data
    >>> refuse_overlapping(nn.Sequential(first, second))
    Traceback (most recent call last):
    ValueError: '0.weight' and '1.weight' are two tensors in the same memory, so ...
    """
    open_until: list[_Span] = []
    for span in sorted(_spans(model), key=lambda span: span.start):
        open_until = [other for other in open_until if other.stop > span.start]
        for other in open_until:
            if (span.tensor.requires_grad or other.tensor.requires_grad) and _share(other, span):
                raise ValueError(
                    f"{other.name!r} and {span.name!r} are two tensors in the same memory, so a step of one would "
                    "change the other, but RoundPipe moves each to memory of its own; tie weights by sharing the "
                    "parameter itself, as in b.weight = a.weight, or give one of them a clone"
                )
        open_until.append(span)


def _spans(model: nn.Module) -> Iterator[_Span]:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_plain = type(tensor) in (nn.Parameter, nn.Buffer, torch.Tensor) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or not tensor.numel():
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        yield _Span(start, start + reach * tensor.element_size(), name, tensor)


def _share(first: _Span, second: _Span) -> bool:
    """Return whether spans that overlap have elements in common: columns of one matrix, for example, have not."""
    size = first.tensor.element_size()
    if _is_dense(first) and _is_dense(second):
        return True
    if second.tensor.element_size() != size or (second.start - first.start) % size:
        return True
    taken = torch.zeros((max(first.stop, second.stop) - first.start) // size, dtype=torch.bool)
    taken.as_strided(first.tensor.shape, first.tensor.stride()).fill_(True)
    offset = (second.start - first.start) // size
    return bool(taken.as_strided(second.tensor.shape, second.tensor.stride(), offset).any())


def _is_dense(span: _Span) -> bool:
    return span.stop - span.start == span.tensor.numel() * span.tensor.element_size()
