"""All schedules by name, and the setting in which to simulate them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rp_sched.planners.classic import CLASSIC, even_stages
from rp_sched.planners.planner import Strategy, plan
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.tasks import Task
from rp_sched.problem.validation import check_steps
from rp_sched.simulation.assignment import Assigner
from rp_sched.simulation.makespan import PricedPlan
from rp_sched.simulation.simulate import simulate
from rp_sched.simulation.timeline import Timeline

# The number of stages per device in the classic schedules.
LOOPS = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 2}
NAMES = ("adaptive", "roundrobin", *CLASSIC)

Calls = Sequence[Sequence[Task]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, a machine, and the mode and microbatches of calls."""

    costs: Sequence[LayerCost]
    limits: Limits
    devices: int
    microbatches: int
    mode: Mode = "fused"

    def priced_plan(self, strategy: Strategy | RoundRobin) -> PricedPlan:
        """Return the plan that a strategy makes, with its costs."""
        computed = plan(
            self.costs,
            devices=self.devices,
            microbatches=self.microbatches,
            mode=self.mode,
            limits=self.limits,
            strategy=strategy,
        )
        return PricedPlan(computed, self.costs, mode=self.mode, microbatches=self.microbatches, limits=self.limits)

    def dealt(self, priced: PricedPlan, calls: int) -> Calls:
        """Return the tasks of `calls` calls of a plan, assigned by a new `Assigner`."""
        check_steps(calls * priced.steps)
        assigner = Assigner(self.devices)
        return [assigner.assign(priced) for _ in range(calls)]

    def play(self, calls: Calls) -> Timeline:
        """Simulate calls."""
        return simulate(
            calls,
            self.costs,
            devices=self.devices,
            microbatches=self.microbatches,
            mode=self.mode,
            limits=self.limits,
        )

    @property
    def ideal_ms(self) -> float:
        """The time per call if no device is idle and, with backward, all layers but the last are recomputed."""
        speed = sum(1 / self.limits.device(number).slowdown for number in range(self.devices))
        forward_ms = sum(cost.forward_ms for cost in self.costs)
        if self.mode == "infer":
            return forward_ms * self.microbatches / speed
        again_ms = forward_ms - self.costs[-1].forward_ms
        return (forward_ms + again_ms + sum(cost.backward_ms for cost in self.costs)) * self.microbatches / speed


def schedules(setting: Setting) -> Mapping[str, Callable[[int], Calls]]:
    """Return, for each schedule's name, a function from a number of calls to their task lists.

    >>> setting = Setting(costs=[LayerCost(1.0)] * 4, limits=Limits(), devices=2, microbatches=2)
    >>> [len(schedules(setting)[name](1)[0]) for name in ("adaptive", "gpipe", "looped-bfs")]
    [2, 6, 7]
    """
    ours = {name: partial(_planned, setting, name) for name in ("adaptive", "roundrobin")}
    if setting.mode != "fused":
        return ours
    return {**ours, **{name: partial(_classic, setting, name) for name in CLASSIC}}


def repeated(tasks: Sequence[Task], calls: int) -> Calls:
    """Repeat a task list for `calls` calls."""
    check_steps(calls * sum(len(task.microbatches) for task in tasks))
    return [tasks] * calls


def _planned(setting: Setting, name: Strategy, calls: int) -> Calls:
    return setting.dealt(setting.priced_plan(name), calls)


def _classic(setting: Setting, name: str, calls: int) -> Calls:
    stages = even_stages(setting.costs, setting.devices * LOOPS[name])
    return repeated(CLASSIC[name](stages, setting.devices, setting.microbatches), calls)
