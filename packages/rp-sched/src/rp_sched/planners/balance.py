"""Spread copies over the gaps between other work."""

import heapq
from collections.abc import Sequence

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole


def balance(sizes: Sequence[int], gaps: int) -> tuple[tuple[int, ...], ...]:
    """Which copies go into which gap, so that the fullest gap has about as little as can be.

    >>> balance([7, 5, 4, 3, 1], 2)
    ((0, 3), (1, 2, 4))

    `sizes`: of each copy, in bytes. A gap gets indices of `sizes`, from the lowest up; it may get none. Each copy,
    the largest first, goes to the gap that has least so far, and the first of these: the fullest gap has at most
    4/3 - 1/(3 gaps) times what is possible.

    Raises `TypeError` or `ValueError` for sizes below zero or no gap. Source: R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969 (longest processing time first).
    """
    whole("gaps", gaps, least=1, bound=bounds.GAPS)
    checked = [whole(f"sizes[{index}]", size) for index, size in enumerate(sizes)]
    fill = [(0, gap) for gap in range(gaps)]
    chosen: list[list[int]] = [[] for _ in range(gaps)]
    for index in sorted(range(len(checked)), key=lambda index: -checked[index]):
        filled, gap = fill[0]
        chosen[gap].append(index)
        heapq.heapreplace(fill, (filled + checked[index], gap))
    return tuple(tuple(sorted(indices)) for indices in chosen)
