"""`Assigner`: assign the tasks of successive calls to devices."""

from weakref import WeakKeyDictionary

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole
from rp_sched.problem.tasks import Task
from rp_sched.simulation.clock import Clock
from rp_sched.simulation.makespan import PricedPlan

# Cached calls of one priced plan: enough for every state in which they find the devices, where these recur.
MOST_KEPT = 128

_Assigned = dict[tuple[float, ...], tuple[tuple[Task, ...], Clock]]


class Assigner:
    """Assigns the tasks of successive calls to devices.

    >>> from rp_sched import LayerCost, Plan
    >>> priced = PricedPlan(Plan(fused=range(0, 1), in_turn=False), [LayerCost(1.0)], mode="fused", microbatches=2)
    >>> assigner = Assigner(2)
    >>> assigner.assign(priced), assigner.assign(priced)
    ((FB[0:1] m0:2 @0,), (FB[0:1] m0:2 @1,))

    Tasks of a plan that is `in_turn` go to the devices in turn. Those of other plans go to the device that becomes
    free first, by a simulated clock that continues from call to call, also when the priced plan changes. Use one
    assigner for all models that share the devices. Not thread-safe. Assignments are cached by plan and device
    state, for as long as the priced plan is used elsewhere.
    """

    def __init__(self, devices: int) -> None:
        self._clock = Clock.idle(whole("devices", devices, least=1, bound=bounds.DEVICES))
        # Weak: plans follow measured times, so priced plans are replaced, each with all its jobs and loads.
        self._kept: WeakKeyDictionary[PricedPlan, _Assigned] = WeakKeyDictionary()

    def assign(self, priced: PricedPlan) -> tuple[Task, ...]:
        """The tasks of the next call, in launch order."""
        kept, state = self._kept.setdefault(priced, {}), self._clock.exact_state()
        if state not in kept:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            kept[state] = _assigned(priced, self._clock.copy())
        tasks, self._clock = kept[state]
        return tasks

    # Its name in 0.1.0.
    deal = assign


def _assigned(priced: PricedPlan, clock: Clock) -> tuple[tuple[Task, ...], Clock]:
    taken = priced.play(clock)
    clock.next_call()
    clock.round_state()
    assigned = zip(priced.jobs, taken, strict=True)
    return tuple(Task(job.kind, job.layers, job.microbatches, device) for job, device in assigned), clock
