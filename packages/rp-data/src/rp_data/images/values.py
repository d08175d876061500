"""What a processor makes of images, as bytes and back, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

_TREE = "tree"
# Shorter tensors take no room worth a table.
_LEAST_NUMBERS = 4096
_SAMPLE = 65_536
_CODES = (torch.uint8, torch.int16)
_INTEGERS = {2: torch.int16, 4: torch.int32}


def to_bytes(values: Mapping[str, Any]) -> bytes | None:
    """Return values as bytes: tensors, numbers, texts, None, lists and tuples of these; None if there are others.

    >>> of_bytes(to_bytes({"grid": torch.tensor([[1, 2, 2]]), "tiles": [1, [2]]}))
    {'grid': tensor([[1, 2, 2]]), 'tiles': [1, [2]]}
    """
    tensors: dict[str, Tensor] = {}
    try:
        tree = json.dumps({name: _packed(value, tensors) for name, value in values.items()})
    except TypeError:
        return None
    tensors[_TREE] = torch.frombuffer(bytearray(tree.encode()), dtype=torch.uint8)
    return save(tensors)


def of_bytes(content: bytes) -> dict[str, Any]:
    """Return what `to_bytes` had."""
    tensors = load(content)
    letters = cast("list[int]", tensors[_TREE].tolist())  # pyright: ignore[reportUnknownMemberType]
    tree: dict[str, Any] = json.loads(bytes(letters))
    return {name: _unpacked(value, tensors) for name, value in tree.items()}


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with objects in place of tensors, which are put among the others."""
    if isinstance(value, Tensor):
        number = str(len(tensors))
        found = _coded(value)
        tensors[number] = value.contiguous() if found is None else found[0]
        if found is None:
            return {"tensor": number}
        tensors[f"{number} table"] = found[1]
        return {"tensor": number, "table": f"{number} table"}
    if isinstance(value, tuple):
        return {"tuple": [_packed(one, tensors) for one in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [_packed(one, tensors) for one in cast("list[Any]", value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value).__name__)


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, tensors) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    places = cast("dict[str, Any]", value)
    if "tuple" in places:
        return tuple(_unpacked(one, tensors) for one in places["tuple"])
    codes = tensors[places["tensor"]]
    if "table" not in places:
        return codes
    return tensors[places["table"]].index_select(0, codes.flatten().int()).view(codes.shape)


def _coded(value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a code for each number of a tensor, and the numbers that they stand for; None if these are too many.

    Pixels have 256 values before a processor scales them, and afterwards no more, or three times as many, if it
    scales each channel by itself: a quarter of the room of fp32, or half of it.
    """
    integers = _INTEGERS.get(value.dtype.itemsize) if value.is_floating_point() else None
    if integers is None or value.numel() < _LEAST_NUMBERS:
        return None
    bits = value.contiguous().view(integers).flatten()
    table = _distinct(bits[:: max(1, len(bits) // _SAMPLE)])
    codes = _looked_up(bits, table)
    wrong = table.index_select(0, codes) != bits
    if wrong.any():
        table = _distinct(torch.cat([table, bits[wrong]]))
        codes = _looked_up(bits, table)
    fitting = next((one for one in _CODES if len(table) <= torch.iinfo(one).max + 1), None)
    if fitting is None or fitting.itemsize >= value.dtype.itemsize:
        return None
    return codes.to(fitting).view(value.shape), table.view(value.dtype)


def _distinct(numbers: Tensor) -> Tensor:
    """Return the different ones of some numbers, in order."""
    return cast("Tensor", numbers.unique())  # pyright: ignore[reportUnknownMemberType]


def _looked_up(numbers: Tensor, table: Tensor) -> Tensor:
    """Return the place of each number in a table that is in order, which may lack it."""
    return torch.searchsorted(table, numbers, out_int32=True).clamp_(max=len(table) - 1)
