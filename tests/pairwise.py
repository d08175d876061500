"""Picks few of many combinations such that every two values that occur together still occur together in one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs(row: Sequence[Hashable]) -> set[Pair]:
    """Every two values of a combination, each with its axis; of a single axis, the value by itself."""
    placed = list(enumerate(row))
    return set(combinations(placed, 2)) if len(placed) > 1 else {(place, place) for place in placed}


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The indices of rows that together have every pair that any row has; always the same for the same rows.

    Greedy: next is the first of those with the most pairs that are still missing.

    >>> covering([(model, plan, device) for model in "ab" for plan in "xy" for device in "12"])
    [0, 3, 5, 6]
    """
    left = [pairs(row) for row in rows]
    chosen: list[int] = []
    while any(left):
        best = max(range(len(rows)), key=lambda index: len(left[index]))
        chosen.append(best)
        covered = set(left[best])
        for missing in left:
            missing -= covered
    return sorted(chosen)


def combination(item: pytest.Function) -> tuple[Hashable, ...]:
    """What a test runs with: a value for each ``parametrize`` and for each fixture that has several.

    ``pairwise(apart="options")``: of the dict of this name, each entry has an axis of its own.
    """
    params: dict[str, Any] = dict(item.callspec.params)
    mark = item.get_closest_marker("pairwise")
    apart = mark.kwargs.get("apart") if mark is not None else None
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        together = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        entries: dict[str, Any] = params.pop(apart) if apart in together else {}
        # Values need not be hashable; the same value is the same object in all tests of a function.
        rest = tuple(id(params.pop(name)) for name in together if name != apart)
        found += [rest, *((rest, key, repr(value)) for key, value in entries.items())]
    return (*found, *(id(value) for _, value in sorted(params.items())))


def superfluous(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of the tests marked ``pairwise`` that cover no further pair.

    Tests on GPUs are looked at by themselves: they must cover every pair where there are some, and the others must
    where there are none.
    """
    groups: dict[tuple[str, bool], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            name = item.nodeid.split("[")[0]
            groups.setdefault((name, item.get_closest_marker("cuda") is not None), []).append(item)
    found: set[pytest.Item] = set()
    for group in groups.values():
        kept = covering([combination(item) for item in group])
        found |= {item for index, item in enumerate(group) if index not in set(kept)}
    return found
