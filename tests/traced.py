"""Picks the tests that coverage looks at: of many cases of a test a few, since the others pass the same lines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

# What takes long under coverage, or does not bear it.
_ELSEWHERE = ("slow", "hypothesis", "untraced", "mutation", "nightly")
_CASES = 8


def traced(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """At most eight cases of each test, evenly spaced; none of tests with certain marks."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, _ELSEWHERE)):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    return {cases[place] for cases in tests.values() for place in spaced(len(cases))}


def spaced(length: int) -> list[int]:
    """At most eight places of a list, evenly spaced.

    >>> spaced(5), spaced(24)
    ([0, 1, 2, 3, 4], [0, 3, 6, 9, 12, 15, 18, 21])
    """
    count = min(length, _CASES)
    return [place * length // count for place in range(count)]
