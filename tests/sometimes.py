"""Of a test with many cases a few run each time, and all in `.ci/run`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pairwise import of_each_test
from traced import spaced

# Of what runs on several devices under several plans, or with other things that vary.
_ON_DEVICES = 2
_ELSEWHERE = ("slow", "later", "nightly", "mutation", "cuda")


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first of every `count` cases runs always, the others are slow.

    >>> [bool(case.marks) for case in one_in(3, "abcd")]
    [False, True, True, False]
    """
    return [
        pytest.param(case, marks=pytest.mark.slow if place % count else ()) for place, case in enumerate(cases)
    ]


def beyond_few(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that wait for `.ci/run`.

    All but `number` of a test that is marked ``few(number)``, and all but two of one that has devices beside other
    parameters; those that run are evenly spaced, and which they are depends on the name. Where there are GPUs,
    all of theirs run.
    """
    found: set[pytest.Item] = set()
    for cases in of_each_test([item for item in items if not any(map(item.get_closest_marker, _ELSEWHERE))]):
        most = _most(cases[0])
        if most is not None and len(cases) > most:
            first = zlib.crc32(cases[0].nodeid.split("[")[0].encode()) % (len(cases) // most)
            found |= set(cases) - {cases[place + first] for place in spaced(len(cases), most)}
    return found


def _most(item: pytest.Function) -> int | None:
    mark = item.get_closest_marker("few")
    if mark is not None:
        return mark.args[0]
    params = set(item.callspec.params)
    return _ON_DEVICES if "devices" in params and params != {"devices"} else None
