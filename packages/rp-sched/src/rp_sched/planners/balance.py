"""Distribute copies evenly over the gaps between other work."""

import heapq
from collections.abc import Sequence

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole


def balance(sizes: Sequence[int], gaps: int) -> tuple[tuple[int, ...], ...]:
    """Assign copies to gaps so that the fullest gap has about as few bytes as possible.

    >>> balance([7, 5, 4, 3, 1], 2)
    ((0, 3), (1, 2, 4))

    `sizes`: bytes of each copy. Returns for each gap the indices of its copies in `sizes`, in ascending order; a
    gap may be empty. Copies are assigned largest first, each to the gap with the fewest bytes so far (the first of
    several). The fullest gap has at most 4/3 - 1/(3 gaps) times the optimum.

    Raises `TypeError` or `ValueError` for negative sizes or no gaps. Source: R. L. Graham, "Bounds on
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
