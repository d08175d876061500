"""Lists in outputs that grow with the batch, as rows tell: with an entry for each image, or for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import getitem
from typing import Any, TypeAlias, cast

import rp_batch

Path: TypeAlias = tuple[str | int, ...]
# By the path of a list in an output: of what it has an entry each, "image" or "sample", or "unknown".
Lists: TypeAlias = Mapping[Path, str]


def joining(output: Any, lists: Lists) -> Any:
    """Return the spec that puts these lists of an output one after another; None if it has none of them.

    >>> joining({"logits": [1.0], "features": [2.0, 3.0]}, {("features",): "image"})
    {'features': Join()}

    Raises `MergeError` for a list of which it is unknown, and for a tuple in place of an output with names.
    """
    if (
        lists
        and not isinstance(output, Mapping)
        and any(isinstance(one, list | tuple) for _, one in _named(output))
    ):
        raise rp_batch.MergeError(
            "output", f"a tuple does not tell which of its lists are {_names(lists)}: {_ADVICE}"
        )
    return _spec(output, lists, "output")


def of_some(values: Sequence[Any], sizes: Sequence[int] | None, lists: Lists) -> Any:
    """Merge values that some parts have; None are the others'. In lists with an entry a sample, theirs are empty.

    >>> import torch
    >>> of_some([None, [torch.ones(2)]], (1, 1), {(): "sample"})
    [tensor([]), tensor([1., 1.])]
    """
    given = [value for value in values if value is not None]
    whole = rp_batch.merge(given, _spec(given[0], lists, "output"))
    for path, entry in lists.items():
        if entry == "sample" and sizes is not None:
            own = _at(given[0], path)
            found = [
                [own[0][:0]] * n if one is None else _at(one, path) for one, n in zip(values, sizes, strict=True)
            ]
            whole = _replaced(whole, path, type(own)(chain.from_iterable(found)))
    return whole


def below(lists: Lists, name: str | int) -> dict[Path, str]:
    """Return the lists inside one field, by their paths from there.

    >>> below({("a", 1): "image", ("b",): "sample"}, "a")
    {(1,): 'image'}
    """
    return {path[1:]: entry for path, entry in lists.items() if path[:1] == (name,)}


_ADVICE = "say how to merge the output (merge_output), call with return_dict=True, or in one microbatch"


def _names(lists: Lists) -> str:
    return ", ".join(sorted({str(path[0]) for path in lists}))


def _spec(output: Any, lists: Lists, where: str) -> Any:
    if () in lists:
        if lists[()] == "unknown":
            raise rp_batch.MergeError(
                where, f"it is unknown whether the list has an entry for each sample: {_ADVICE}"
            )
        return rp_batch.Join()
    inner = {
        name: _spec(value, own, f"{where}[{name!r}]")
        for name, value in _named(output)
        if (own := below(lists, name))
    }
    found = {name: spec for name, spec in inner.items() if spec is not None}
    if isinstance(output, Mapping) or not found:
        return found or None
    return type(output)(found.get(name) for name, _ in _named(output))


def _named(value: Any) -> list[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str | int, Any]", value).items())
    return list(enumerate(cast("Sequence[Any]", value))) if isinstance(value, list | tuple) else []


def _at(value: Any, path: Path) -> Any:
    return reduce(getitem, path, value)


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    items = {name: _replaced(one, path[1:], new) if name == path[0] else one for name, one in _named(value)}
    kind = cast("Any", type(value))
    return kind(**cast("dict[str, Any]", items)) if isinstance(value, Mapping) else kind(items.values())
