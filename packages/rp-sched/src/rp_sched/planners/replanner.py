"""Keep a plan up to date with measured times, searching only in the time the caller gives."""

from collections.abc import Sequence

from rp_sched.planners.adaptive import Search
from rp_sched.planners.estimator import Estimator
from rp_sched.problem.checks import non_negative
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.simulation.makespan import Course


class Replanner:
    """The plan in use for one kind of call, and the search for a better one.

    >>> replanner = Replanner([LayerCost(0, weight_bytes=10**7)] * 4, devices=2, microbatches=4, mode="fused")
    >>> replanner.course().plan
    Plan(FB[0:4] m0:2 m2:4, first free)
    >>> replanner.improve(budget_ms=1.0)
    True

    Call `course()` before every call of the model: it returns the plan in use at once. If times have changed by
    more than a fraction `threshold` (see `Estimator.moved`), it first simulates that plan with the new times and
    restarts the search, which replaces the plan when it finds a better one. The search runs only in `improve`:
    call it while the devices are busy and the caller is idle, until it returns True.

    `layers`: the costs; the estimator replaces their times. Raises what `Search` raises.
    """

    def __init__(
        self,
        layers: Sequence[LayerCost],
        *,
        devices: int,
        microbatches: int,
        mode: Mode,
        limits: Limits = NO_LIMITS,
        estimator: Estimator | None = None,
        threshold: float = 0.1,
    ) -> None:
        self.estimator = Estimator(len(layers)) if estimator is None else estimator
        self._layers = tuple(layers)
        self._devices = devices
        self._microbatches = microbatches
        self._mode: Mode = mode
        self._limits = limits
        self._threshold = non_negative("threshold", threshold)
        self._search = Search(
            self.estimator.costs(self._layers),
            devices=devices,
            microbatches=microbatches,
            mode=mode,
            limits=limits,
        )

    def course(self, limits: Limits | None = None) -> Course:
        """Return the course of the plan in use; restart the search if times or the given `limits` have changed."""
        changed = limits is not None and limits != self._limits
        self._limits = self._limits if limits is None else limits
        if changed or self.estimator.moved(self._threshold):
            self._search = Search(
                self.estimator.costs(self._layers),
                devices=self._devices,
                microbatches=self._microbatches,
                mode=self._mode,
                limits=self._limits,
                first=(self._search.best.plan,),
                quick_plans=0,
            )
        return self._search.best

    @property
    def best(self) -> Course:
        """The course of the best plan so far. The next call gets it unless times or limits change before."""
        return self._search.best

    @property
    def promised_ms(self) -> float:
        """The predicted time per call of the plan in use; see `Search.promised_ms`."""
        return self._search.promised_ms

    def improve(self, *, budget_ms: float) -> bool:
        """Search for about `budget_ms` and settle last (see `Search.settle`); return whether that is done."""
        return self._search.advance_settling(budget_ms=budget_ms)
