"""Marks most cases of a test that has many as slow, so that a few run each time and all in `.ci/run`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first of every `count` cases runs always, the others are slow.

    >>> [bool(case.marks) for case in one_in(3, "abcd")]
    [False, True, True, False]
    """
    return [
        pytest.param(case, marks=pytest.mark.slow if place % count else ()) for place, case in enumerate(cases)
    ]
