"""`plan`: compute the plan of one model by a named strategy."""

from collections.abc import Sequence
from typing import Literal

from rp_sched.errors import Infeasible
from rp_sched.planners.adaptive import Search
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.problem.checks import shown
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.validation import check_problem
from rp_sched.simulation.stage_costs import Loads

Strategy = Literal["adaptive", "roundrobin"]
"""`adaptive`: the fastest plan that a search finds. `roundrobin`: the published method; see `RoundRobin`."""


def plan(
    costs: Sequence[LayerCost],
    *,
    devices: int,
    microbatches: int,
    mode: Mode,
    limits: Limits = NO_LIMITS,
    strategy: Strategy | RoundRobin = "adaptive",
) -> Plan:
    """Compute a plan for a model from the costs of its layers.

    >>> layers = [LayerCost(1.0, weight_bytes=10)] * 6
    >>> plan(layers, devices=2, microbatches=4, mode="fused")
    Plan(FB[0:6] m0:2 m2:4, first free)
    >>> plan(layers, devices=2, microbatches=4, mode="fused", limits=Limits(stage_bytes=60), strategy="roundrobin")
    Plan(F[0:2] F[2:5] FB[5:6] B[4:5] B[3:4] B[2:3] B[1:2] B[0:1])

    The plan is within the limits: a stage leaves room to fetch the next one (see `Limits`), unless it is a single
    layer, or the whole model on a device that holds it. `adaptive` minimises the simulated steady-state time per
    call and is never slower than `roundrobin` in it (see `Search`, which can be run step by step, and `settle`).

    Raises `Infeasible` if a single layer is too large for a device, or the model for the host; `TypeError` or
    `ValueError` for invalid arguments.
    """
    if strategy == "adaptive":
        search = Search(costs, devices=devices, microbatches=microbatches, mode=mode, limits=limits)
        return search.settle().plan
    check_problem(costs, devices=devices, microbatches=microbatches, mode=mode)
    limits.check_devices(devices)
    loads = Loads(costs, limits)
    loads.check_feasible(mode)
    computed = published(strategy).plan(loads, devices=devices, microbatches=microbatches, mode=mode)
    if limits.host_memory_bytes is not None and not loads.fits_host(computed, microbatches):
        raise Infeasible(None, loads.host_bytes(computed, microbatches), limits.host_memory_bytes)
    return computed


def published(strategy: object) -> RoundRobin:
    """Return the `RoundRobin` for a strategy other than `adaptive`.

    >>> published("roundrobin")
    RoundRobin(min_stages=None, upper_threshold=1.1, model_memory_limit=None)
    """
    if strategy == "roundrobin":
        return RoundRobin()
    if isinstance(strategy, RoundRobin):
        return strategy
    wanted = "'adaptive', 'roundrobin' or a RoundRobin"
    raise ValueError(f"strategy must be {wanted}, but is {shown(strategy)} instead")
