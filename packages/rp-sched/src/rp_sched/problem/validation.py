"""Refuse problems that cannot be planned because they are not problems."""

from collections.abc import Sequence

from rp_sched.problem.checks import whole
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.modes import check_mode


def check_problem(costs: Sequence[LayerCost], *, devices: int, microbatches: int, mode: object) -> None:
    """Raise unless there is a layer, a device, a microbatch and a mode.

    >>> check_problem([], devices=1, microbatches=1, mode="infer")
    Traceback (most recent call last):
    ValueError: costs must name at least one layer, but is empty
    """
    whole("devices", devices, least=1)
    whole("microbatches", microbatches, least=1)
    check_mode(mode)
    check_costs(costs)


def check_costs(costs: Sequence[LayerCost]) -> None:
    """Raise unless there is a layer, and layers only."""
    if not costs:
        raise ValueError("costs must name at least one layer, but is empty")
    for layer, cost in enumerate(costs):
        if type(cost) is not LayerCost:
            raise TypeError(f"costs[{layer}] must be a LayerCost, but is {cost!r} instead")
