"""Choose the number of microbatches whose plan is fastest."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rp_sched.errors import Infeasible
from rp_sched.planners.adaptive import Search
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import Limits
from rp_sched.problem.modes import Mode

Problem = tuple[Sequence[LayerCost], Limits]
"""The costs of layers for one microbatch, and the machine's limits."""

# Larger numbers are not tried: launching alone would take minutes a step.
_MOST = 512
# A plan that is faster by less than this is not worth more microbatches.
_EQUAL = 0.01
# Shares of the device's memory to try for prefetched weights.
_AHEAD = (0.5, 0.25, 0.125, 0.0625)
# Plans that are tried for each number, and for each split of a device's memory.
_QUICK_PLANS = 3


def counts_of(batch_size: int) -> list[int]:
    """List the numbers of microbatches that divide a batch evenly, smallest first.

    >>> counts_of(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [count for count in range(1, min(batch_size, _MOST) + 1) if batch_size % count == 0]


def fastest_count(
    counts: Iterable[int],
    problem_of: Callable[[int], Problem],
    *,
    devices: int,
    mode: Mode,
    tolerance: float = 0.0,
) -> tuple[int, Search] | None:
    """Return the first number whose plan is within 1 % of the fastest, and its search; None if no plan fits.

    >>> layer = LayerCost(1.0, kept_bytes=50)
    >>> def problem(count):
    ...     return [LayerCost(8.0 / count, kept_bytes=80 // count)] * 2, Limits(device_memory_bytes=100)
    >>> fastest_count(counts_of(8), problem, devices=1, mode="fused")[0]
    2

    Args:
        counts: the numbers to try, smallest first.
        problem_of: returns costs and limits if a batch is split into this many microbatches.
        tolerance: see `rp_sched.Search`.
    """
    searches: list[tuple[int, Search]] = []
    for count in counts:
        try:
            search = searched(
                problem_of(count), devices=devices, microbatches=count, mode=mode, tolerance=tolerance
            )
        except Infeasible:
            continue
        searches.append((count, search))
    if not searches:
        return None
    least_ms = min(search.best_ms for _, search in searches)
    return next(pair for pair in searches if pair[1].best_ms <= least_ms * (1 + _EQUAL))


def searched(problem: Problem, *, devices: int, microbatches: int, mode: Mode, tolerance: float = 0.0) -> Search:
    """Return the search whose first plan is fastest, among those for several splits of device memory.

    Raises `rp_sched.Infeasible` if none of them has a plan.
    """
    costs, limits = problem
    searches: list[Search] = []
    refused: list[Infeasible] = []
    for choice in memory_splits(costs, limits):
        try:
            searches.append(
                Search(
                    costs,
                    devices=devices,
                    microbatches=microbatches,
                    mode=mode,
                    limits=choice,
                    quick_plans=_QUICK_PLANS,
                    tolerance=tolerance,
                )
            )
        except Infeasible as error:
            refused.append(error)
    if not searches:
        raise refused[-1]
    return min(searches, key=lambda search: search.best_ms)


def memory_splits(layers: Sequence[LayerCost], limits: Limits) -> Iterator[Limits]:
    """Yield the limits to try: several splits of device memory between prefetched weights and activations.

    If everything fits, `limits` alone. Otherwise large stages leave little room for activations, and small stages
    are many, so the caller compares plans for several sizes.
    """
    room = limits.device_memory_bytes
    wanted = sum(
        2 * layer.weight_bytes + layer.gradient_bytes + layer.kept_bytes + layer.graph_bytes for layer in layers
    )
    if room is None or wanted <= room or limits.stage_bytes is not None:
        yield limits
    else:
        for share in _AHEAD:
            yield replace(limits, ahead_bytes=max(int(room * share), 1))
