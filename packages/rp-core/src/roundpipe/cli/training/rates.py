"""Learning rates by step."""

from __future__ import annotations

import math

WARM_UP = 0.1
LAST_RATE = 0.1


def learning_rate(
    step: int, *, steps: int, highest: float, warm_up: float = WARM_UP, schedule: str = "cosine"
) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then cosine decay to a tenth, or constant.

    Args:
        warm_up: a number of steps or, below 1, a part of all steps.

    >>> [round(learning_rate(step, steps=20, highest=1.0), 2) for step in (1, 2, 11, 20)]
    [0.5, 1.0, 0.55, 0.1]
    >>> [learning_rate(step, steps=20, highest=1.0, warm_up=4, schedule="constant") for step in (1, 4, 20)]
    [0.25, 1.0, 1.0]
    """
    rise = warm_up if warm_up >= 1 else max(1, round(warm_up * steps))
    if step <= rise:
        return highest * step / rise
    if schedule == "constant":
        return highest
    done = (step - rise) / (steps - rise)
    return highest * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)
