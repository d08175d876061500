"""`Dealer`: assign the tasks of successive calls to devices."""

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole
from rp_sched.problem.tasks import Task
from rp_sched.simulation.clock import Clock
from rp_sched.simulation.makespan import Course

# Cached calls: enough for a few courses with every state in which their calls find the devices.
MOST_KEPT = 512


class Dealer:
    """Assigns the tasks of successive calls to devices.

    >>> from rp_sched import LayerCost, Plan
    >>> course = Course(Plan(fused=range(0, 1), in_turn=False), [LayerCost(1.0)], mode="fused", microbatches=2)
    >>> dealer = Dealer(2)
    >>> dealer.deal(course), dealer.deal(course)
    ((FB[0:1] m0:2 @0,), (FB[0:1] m0:2 @1,))

    Tasks of a plan that is `in_turn` go to the devices in turn. Those of other plans go to the device that becomes
    free first, by a simulated clock that continues from call to call, also when the course changes. Use one dealer
    for all models that share the devices. Not thread-safe. Assignments are cached by course and device state.
    """

    def __init__(self, devices: int) -> None:
        self._clock = Clock.idle(whole("devices", devices, least=1, bound=bounds.DEVICES))
        self._kept: dict[object, tuple[tuple[Task, ...], Clock]] = {}

    def deal(self, course: Course) -> tuple[Task, ...]:
        """The tasks of the next call, in launch order."""
        key = (course, self._clock.exact_state())
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = _deal(course, self._clock.copy())
        tasks, self._clock = self._kept[key]
        return tasks


def _deal(course: Course, clock: Clock) -> tuple[tuple[Task, ...], Clock]:
    taken = course.play(clock)
    clock.next_call()
    clock.round_state()
    dealt = zip(course.jobs, taken, strict=True)
    return tuple(Task(job.kind, job.layers, job.microbatches, device) for job, device in dealt), clock
