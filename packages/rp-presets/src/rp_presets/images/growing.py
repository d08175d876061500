"""Lists in a model's output that grow with the batch, such as features of images: found by giving it fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Path: TypeAlias = tuple[str | int, ...]


def growing_lists(whole: Any, part: Any, samples: tuple[int, int]) -> dict[Path, str]:
    """Return the paths of lists that have another length in the output of a part of a batch, and what they hold.

    >>> growing_lists({"hidden": (1, 2), "boxes": [1, 2, 3]}, {"hidden": (1, 2), "boxes": [1, 2]}, (3, 1))
    {('boxes',): 'image'}

    `samples`: how many the batch and its part have. A list of these lengths has an entry for each "sample", others
    for each "image".
    """
    return dict(_found(whole, part, samples, ()))


def lists_in(output: Any) -> list[Path]:
    """Return the paths of all lists in an output that hold no others.

    >>> lists_in({"hidden": [1], "deep": [(0, [1, 2])]})
    [('hidden',), ('deep', 0, 1)]
    """
    return list(_innermost(output, ()))


def whole_and_part(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a batch and its first sample, along the first dimension. A batch of one sample is that twice.

    >>> whole_and_part({"input_ids": torch.zeros(1, 3)})[0]["input_ids"].shape
    torch.Size([2, 3])
    """
    count = num_samples(inputs)

    def along(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        has_samples = {
            name for name, one in inputs.items() if isinstance(one, Tensor) and one.shape[:1] == (count,)
        }
        return {name: change(one) if name in has_samples else one for name, one in inputs.items()}

    if count == 1:
        return along(lambda one: torch.cat([one, one])), dict(inputs)
    return dict(inputs), along(lambda one: one[:1])


def num_samples(inputs: Mapping[str, Any]) -> int:
    """Return how many samples a batch of tokens has; 0 of other batches."""
    tokens = (inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
    return next(map(len, tokens), 0)


def _innermost(output: Any, path: Path) -> Iterator[Path]:
    inner = [found for name, one in _items(output) for found in _innermost(one, (*path, name))]
    yield from inner
    if not inner and isinstance(output, list | tuple):
        yield path


def _found(whole: Any, part: Any, samples: tuple[int, int], path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(whole, list | tuple) and len(cast("list[Any]", whole)) != len(part):
        lengths = len(cast("list[Any]", whole)), len(part)
        yield path, "sample" if lengths == samples else "image"
        return
    for name, one in _items(whole):
        other = dict(_items(part)).get(name)
        if type(one) is type(other):
            yield from _found(one, other, samples, (*path, name))


def _items(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str | int, Any]", value).items())
    return list(enumerate(cast("list[Any]", value))) if isinstance(value, list | tuple) else []
