"""Picks the tests that coverage looks at: of many cases of a test a few, since the others pass the same lines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

# What takes long under coverage, or does not bear it.
_ELSEWHERE = ("slow", "hypothesis", "untraced", "mutation", "nightly")
# Each costs three to five times its time. Six more raise what is covered by less than one percent.
_CASES = 2


def traced(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """At most two cases of each test, evenly spaced; none of tests with certain marks."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, _ELSEWHERE)):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    return {cases[place] for cases in tests.values() for place in spaced(len(cases))}


def spaced(length: int) -> list[int]:
    """At most two places of a list, evenly spaced.

    >>> spaced(1), spaced(24)
    ([0], [0, 12])
    """
    count = min(length, _CASES)
    return [place * length // count for place in range(count)]
