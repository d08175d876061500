"""Validate the arguments that planners and simulator share: costs, devices, microbatches, mode."""

from collections.abc import Sequence

from rp_sched.problem import bounds
from rp_sched.problem.checks import at_most, shown, whole
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.modes import check_mode


def check_problem(costs: Sequence[LayerCost], *, devices: int, microbatches: int, mode: object) -> None:
    """Raise unless there is a layer, a device, a microbatch and a valid mode, and no bound is exceeded.

    >>> check_problem([], devices=1, microbatches=1, mode="infer")
    Traceback (most recent call last):
    ValueError: costs must name at least one layer, but is empty
    """
    whole("devices", devices, least=1, bound=bounds.DEVICES)
    whole("microbatches", microbatches, least=1, bound=bounds.MICROBATCHES)
    check_mode(mode)
    check_costs(costs)
    at_most("layers times microbatches", len(costs) * microbatches, bounds.LAYER_RUNS)


def check_steps(steps: int) -> None:
    """Raise for more steps than a timeline should hold; a step is one microbatch in one stage."""
    at_most("the number of times that a stage runs a microbatch, in all calls,", steps, bounds.STEPS)


def check_costs(costs: Sequence[LayerCost]) -> None:
    """Raise unless there is at least one layer, not too many, and each is a `LayerCost`."""
    if not costs:
        raise ValueError("costs must name at least one layer, but is empty")
    at_most("the number of layers", len(costs), bounds.LAYERS)
    for layer, cost in enumerate(costs):
        if type(cost) is not LayerCost:
            raise TypeError(f"costs[{layer}] must be a LayerCost, but is {shown(cost)} instead")
