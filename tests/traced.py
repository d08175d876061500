"""Picks the tests that coverage looks at: of many cases of a test a few, since the others pass the same lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

# What takes long under coverage, or does not bear it.
_ELSEWHERE = ("slow", "hypothesis", "untraced", "mutation", "nightly")
# Coverage makes them take three to five times as long, those of the engine longest, and most cases of a test pass
# the same lines. Not where they are optimizers, or families of models.
_CASES = 3
_CASES_OF = {"roundpipe": 2, "rp_optim": 8, "rp_presets": 8}

# Dear ones whose lines others pass, too: `scripts/untraced` has found them.
_LISTED = frozenset(Path(__file__).with_name("untraced.txt").read_text().splitlines())


def traced(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """At most three cases of each test, or as many as its folder has, evenly spaced; none listed or marked so."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.split("[")[0]
        if name not in _LISTED and not any(map(item.get_closest_marker, _ELSEWHERE)):
            tests.setdefault(name, []).append(item)
    return {cases[place] for cases in tests.values() for place in spaced(len(cases), _most(cases[0]))}


def _most(item: pytest.Item) -> int:
    return _CASES_OF.get(item.path.parent.name, _CASES)


def spaced(length: int, most: int) -> list[int]:
    """At most so many places of a list, evenly spaced.

    >>> spaced(5, 8), spaced(24, 8)
    ([0, 1, 2, 3, 4], [0, 3, 6, 9, 12, 15, 18, 21])
    """
    count = min(length, most)
    return [place * length // count for place in range(count)]
