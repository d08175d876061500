"""Drop keys whose value is null: null is an absent key, at every depth, but stays in lists."""

from __future__ import annotations

from typing import Any, cast


def without_nulls(value: Any) -> tuple[Any, int]:
    """Return a value of JSON without its keys that are null, and their number.

    Tables have every key of a column in every row, as null where a row has none.

    >>> without_nulls({"a": None, "b": [{"c": None}, None]})
    ({'b': [{}, None]}, 2)
    """
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        kept = {name: without_nulls(one) for name, one in fields.items() if one is not None}
        dropped = len(fields) - len(kept) + sum(count for _, count in kept.values())
        return {name: one for name, (one, _) in kept.items()}, dropped
    if isinstance(value, list):
        members = [without_nulls(one) for one in cast("list[Any]", value)]
        return [one for one, _ in members], sum(count for _, count in members)
    return value, 0
