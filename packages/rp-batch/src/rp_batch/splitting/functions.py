"""Call users' split functions and check what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from rp_batch.errors import SizeError, SplitError
from rp_batch.spec import Parts
from rp_batch.splitting.infer import SplitSubject, decide

__all__ = ["split_call", "split_tree"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def split_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parts: int
) -> Parts[Call]:
    """Split the arguments of a call by a function, which chooses the number of parts.

    The function returns a list of pairs (args, kwargs), or the pair of lists that torch's own splitter returns.
    """
    returned = function(args, kwargs, parts)
    calls = [_call(item, index) for index, item in enumerate(_pairs(returned))]
    if not calls:
        raise _not_calls(f"returned {_brief(returned)}")
    return Parts(calls, sizes=_declared_sizes(returned) or _inferred_sizes(calls))


def split_tree(
    function: Callable[..., Any], value: Any, parts: int, *, sizes: tuple[int, ...] | None, name: str
) -> Parts[Any]:
    """Split a tree by a function, which must return exactly `parts` parts."""
    items = _items(returned := function(value, parts))
    if items is None or len(items) != parts:
        raise SplitError(
            name,
            f"the split function must return a list of {parts} parts, but returned {_brief(returned)}",
        )
    if sizes is not None and _declared_sizes(returned) not in (None, sizes):
        raise SizeError(
            name,
            f"the split function must return parts of the input's sizes, {sizes}, but its Parts have "
            f"{_declared_sizes(returned)}; split the label like the input",
        )
    return Parts(items, sizes=sizes or _declared_sizes(returned))


def _declared_sizes(returned: Any) -> tuple[int, ...] | None:
    """Return the sizes that a function returned with its parts, if any."""
    return cast("Parts[Any]", returned).sizes if isinstance(returned, Parts) else None


def _items(value: Any) -> list[Any] | None:
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else None


def _is_kwargs(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in cast("Mapping[Any, Any]", value))


def _pairs(returned: Any) -> list[Any]:
    """Return the items that should be (args, kwargs) pairs. torch's two lists are zipped into pairs."""
    items = _items(returned) or []
    if len(items) != 2 or not isinstance(items[0], list) or not isinstance(items[1], list):
        return items
    all_args, all_kwargs = cast("list[list[Any]]", items)
    if not all(map(_is_kwargs, all_kwargs)):
        return items
    if len(all_args) != len(all_kwargs):
        raise _not_calls(f"returned {len(all_args)} args and {len(all_kwargs)} kwargs")
    return list(zip(all_args, all_kwargs, strict=True))


def _call(item: Any, index: int) -> Call:
    halves = _items(item) or []
    if len(halves) != 2:
        raise _not_calls(f"returned {_brief(item)} as part {index}")
    args, kwargs = _items(halves[0]), halves[1]
    if args is None or not _is_kwargs(kwargs):
        raise _not_calls(f"returned ({_brief(halves[0])}, {_brief(kwargs)}) as part {index}")
    return tuple(args), dict(kwargs)


def _not_calls(found: str) -> SplitError:
    wanted = "a list of pairs (tuple of args, dict of kwargs), one for each part"
    return SplitError("args", f"the split function must return {wanted}, but {found}")


def _inferred_sizes(calls: list[Call]) -> tuple[int, ...] | None:
    """Return the batch size of each part, inferred from its tensors; None if any cannot be inferred."""
    try:
        sizes = [decide(SplitSubject.call(*call), None, batch_size=None).batch_size for call in calls]
    except SizeError:
        return None
    return None if None in sizes else tuple(cast("list[int]", sizes))


def _brief(value: Any) -> str:
    items = _items(value)
    return f"a {type(value).__name__}" if items is None else f"a {type(value).__name__} of {len(items)} items"
