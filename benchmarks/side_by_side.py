"""Timing several ways of doing one job in one process: rounds that take turns, and the median of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def side_by_side(
    ways: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of one call of each way; each round runs every way once, so slow moments hit all alike.

    >>> sorted(side_by_side({"one": lambda: 1, "two": lambda: 2}, rounds=3))
    ['one', 'two']
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warmup + rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}
