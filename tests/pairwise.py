"""Picks few of many combinations of parameters such that each value, or every two that meet, still occur."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs(row: Sequence[Hashable]) -> set[Pair]:
    """Every two values of a combination, each with its axis; of a single axis, the value by itself."""
    placed = list(enumerate(row))
    return set(combinations(placed, 2)) if len(placed) > 1 else {(place, place) for place in placed}


def singles(row: Sequence[Hashable]) -> set[tuple[int, Hashable]]:
    """Each value of a combination, with its axis."""
    return set(enumerate(row))


def _how_often(values: Iterable[Hashable], uses: Mapping[Hashable, int]) -> tuple[int, int]:
    """Less the more of the values are missing, and then the more often the others were chosen."""
    counts = [uses[value] for value in values]
    return -counts.count(0), sum(counts)


def with_each_value(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The indices of rows that together have every value that any row has; always the same for the same rows.

    Greedy: next is the first of those with the most values that are missing, and of these with values that were
    chosen least, so that the devices of a test with many other values take turns.

    >>> with_each_value([(plan, device) for plan in "xyzw" for device in "12"])
    [0, 3, 4, 7]
    """
    placed = [singles(row) for row in rows]
    uses = dict.fromkeys(set().union(*placed), 0)
    chosen: list[int] = []
    while not all(uses.values()):
        best = min(range(len(rows)), key=lambda index: _how_often(placed[index], uses))
        chosen.append(best)
        for value in placed[best]:
            uses[value] += 1
    return sorted(chosen)


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


def superfluous(items: Sequence[pytest.Item], *, pairs: bool = True) -> set[pytest.Item]:
    """Those of the tests marked ``pairwise`` that cover no further pair.

    Without `pairs`: those of all tests that cover no further value. Tests that have devices alone take turns in
    them, as few fail on one number of devices and pass on others.

    Tests on GPUs are looked at by themselves, always by pairs: they must cover every pair where there are some,
    and the others must where there are none.
    """
    found: set[pytest.Item] = set()
    for group in of_each_test(items):
        by_pairs = pairs or group[0].get_closest_marker("cuda")
        if by_pairs and not group[0].get_closest_marker("pairwise"):
            continue
        rows = [combination(item) for item in group]
        if max(map(len, rows)) < 2:
            found |= set() if by_pairs else _of_other_devices(group)
            continue
        kept = set(covering(rows) if by_pairs else with_each_value(rows))
        found |= {item for index, item in enumerate(group) if index not in kept}
    return found


def _of_other_devices(group: Sequence[pytest.Function]) -> set[pytest.Item]:
    """All but one of the cases of a test that differ in their devices alone; which one depends on its name."""
    if set(group[0].callspec.params) != {"devices"}:
        return set()
    kept = zlib.crc32(group[0].nodeid.split("[")[0].encode()) % len(group)
    return {item for index, item in enumerate(group) if index != kept}


def of_each_test(items: Sequence[pytest.Item]) -> Iterable[list[pytest.Function]]:
    """The cases of each test that has some, those on GPUs by themselves."""
    groups: dict[tuple[str, bool], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = item.nodeid.split("[")[0]
            groups.setdefault((name, item.get_closest_marker("cuda") is not None), []).append(item)
    return groups.values()
