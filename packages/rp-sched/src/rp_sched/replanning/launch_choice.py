"""What ``launch="auto"`` is in calls of one kind: launched by Python, or by graphs where these gain."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from rp_sched.problem.tasks import Task
from rp_sched.replanning.estimator import Estimator
from rp_sched.replanning.kept import NOT_KEPT, KeptLaunch, NotKept

_LOG = logging.getLogger(__name__)
# Graphs are tried where launching takes at least this part of what devices take. Devices are timed while they are
# launched to: where launching bounds them, both are about the same, since they wait for it. Not quite, since
# launching is processor time: a thread that waits for the GIL takes none. Where devices bound, it was some 0.3. Of
# several devices the GIL's share is an upper bound, so there graphs may be tried in vain.
_BOUND = 0.7
# They stay until it takes less than this part, for other layers or shapes.
_STAYS = 0.5
# They have to take over this part of launching: some layers are not theirs.
_LEAST_PART = 0.2
# Graphs are judged by so many calls, and as many by Python before. Calls whose layers are measured take longer, so
# they do not count.
_TRIAL = 5
GRAPH_GAIN = 0.02
"""The part of a call's time that graphs have to save."""
# The latest calls that count, as for plans.
_WINDOW = 8
# What an earlier process has measured is believed if calls take the same but for this part.
_SAME = 0.1
# They are given up after so many calls in which none was launched.
_PATIENCE = 32
# Calls count under one plan; under any once so many plans came too early for that.
_PLANS = 8


@dataclass(frozen=True, slots=True)
class LaunchDecision:
    """How calls of one kind are launched, and why, in words.

    >>> str(LaunchDecision(False, "launching takes 76 ms of a call, its devices 300 ms"))
    'eager, since launching takes 76 ms of a call, its devices 300 ms'
    """

    by_graphs: bool
    reason: str

    def __str__(self) -> str:
        return f"{'graphs' if self.by_graphs else 'eager'}, since {self.reason}"


class MeasuredCalls(Protocol):
    """The measurements of calls of one kind.

    `what`: the model and the kind. `num_drifts`: how often layers took other times than before.
    `launch_gil_share`: the largest share of launching that can hold the GIL.
    """

    what: str
    estimator: Estimator
    num_drifts: int
    launch_gil_share: float

    def is_young(self) -> bool:
        """Whether the first calls are still to be measured."""
        ...

    def launch_by_graphs(self, by_graphs: bool, /) -> None:
        """Graphs launch layers from now on, or Python again."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """What the tasks of a call take, in ms.

    `launching_ms`: the longest that one thread launches by Python, or that all of them hold the GIL for it.
    `computing_ms`: the longest that one device computes. `replayed`: the part of launching that graphs would take
    over.
    """

    launching_ms: float
    computing_ms: float
    replayed: float

    def bounds(self, part: float) -> bool:
        """Whether launching takes at least this part of what devices take."""
        return self.launching_ms >= part * self.computing_ms

    def __str__(self) -> str:
        return f"launching takes {self.launching_ms:.0f} ms of a call, its devices {self.computing_ms:.0f} ms"


@dataclass(frozen=True, slots=True)
class LaunchQuestion:
    """A call that is to be launched.

    `layers`: asks which layers graphs could launch. `missing_bytes`: asks for the device memory that graphs of
    these layers lack; None if that is not known yet.
    """

    tasks: Sequence[Task]
    layers: Callable[[], frozenset[int]]
    missing_bytes: Callable[[frozenset[int]], int | None]

    @property
    def plan(self) -> Hashable:
        """What calls have in common whose tasks are alike but for their devices."""
        return tuple(replace(task, device=0) for task in self.tasks)

    def replayable(self) -> frozenset[int]:
        """The layers that graphs could launch in these tasks.

        Not the last one before a loss function, which reads what it returns: Python launches both.
        """
        return self.layers() - {task.layers.stop - 1 for task in self.tasks if task.computes_loss}


def launch_times(tasks: Sequence[Task], measured: MeasuredCalls, layers: Collection[int]) -> LaunchTimes | None:
    """Return what tasks take by measured times, if graphs launched `layers`; None without times of launching."""
    launching: dict[int, float] = {}
    computing: dict[int, float] = {}
    replayed_ms = 0.0
    for task in tasks:
        count = len(task.microbatches)
        for layer in task.layers:
            launch_ms, compute_ms = _of_layer(task, layer, measured.estimator)
            launching[task.device] = launching.get(task.device, 0.0) + count * launch_ms
            computing[task.device] = computing.get(task.device, 0.0) + count * compute_ms
            replayed_ms += count * launch_ms * (layer in layers)
    all_ms = sum(launching.values())
    if not all_ms:
        return None
    # Threads launch beside each other, but for the part that holds the GIL.
    longest = max(*launching.values(), all_ms * measured.launch_gil_share)
    return LaunchTimes(longest, max(computing.values()), replayed_ms / all_ms)


def _of_layer(task: Task, layer: int, estimator: Estimator) -> tuple[float, float]:
    """How long a microbatch of a layer is launched and computed in a task, by measured times."""

    def ms(*names: str) -> float:
        found = (estimator.estimate(name, layer) for name in names)
        return next((one for one in found if one is not None), 0.0)

    launch_ms, compute_ms = 0.0, 0.0
    if task.runs_forward or task.recomputes:
        launch_ms += ms(*["recompute_launch_ms"] * task.recomputes, "forward_launch_ms")
        compute_ms += ms("forward_ms")
    if task.runs_backward:
        launch_ms += ms("backward_launch_ms")
        compute_ms += ms("backward_ms")
    return launch_ms, compute_ms


class LaunchChoice:
    """Decides for calls of one kind, as often as what it depends on changes.

    `decision`: None until the first nine calls are measured, and some after these for graphs to be compared with;
    also on devices that have no choice. `layers`: those that graphs launch; empty: none. `kept`: what an earlier
    process has settled for, which is begun with. It is checked: if calls take other times, it counts no longer.

    Graphs are tried where launching bounds a call and there is memory for them. They stay if calls were faster, or
    if `is_timed` is false: then nobody notes how long calls take.
    """

    def __init__(self, measured: MeasuredCalls, *, is_timed: bool = True, kept: NotKept = NOT_KEPT) -> None:
        self.decision: LaunchDecision | None = None
        self.layers: frozenset[int] = frozenset()
        self._measured = measured
        self._is_timed = is_timed
        self._kept = kept
        # What an earlier process has settled for, until it is checked.
        self._earlier: KeptLaunch | None = None
        self._asked: Hashable = None
        self._num_drifts = measured.num_drifts
        # Calls have shown whether graphs gain, for layers as they are.
        self._is_judged = False
        # Graphs were the last choice by times.
        self._chose_graphs = False
        self._plan: Hashable = None
        self._ms: dict[bool, deque[float]] = {}
        self._num_plans = self._idle_calls = 0
        self._forget_calls()
        if is_timed and (earlier := kept.launch()) is not None:
            self._begin_with(earlier)

    def _begin_with(self, earlier: KeptLaunch) -> None:
        self._earlier, self.layers = earlier, earlier.layers
        self.decision = LaunchDecision(earlier.by_graphs, f"in an earlier process {earlier}")
        self._measured.launch_by_graphs(earlier.by_graphs)
        _LOG.info("%s: launch %s", self._measured.what, self.decision)

    @property
    def by_graphs(self) -> bool:
        """Whether graphs launch layers now."""
        return bool(self.layers)

    def decide(self, question: LaunchQuestion) -> None:
        """Decide how the next call is launched; a change is one line in the log."""
        if self._measured.num_drifts != self._num_drifts:
            self._num_drifts, self._is_judged, self._earlier = self._measured.num_drifts, False, None
            self._forget_calls()
        before, self._plan = self._plan, question.plan
        if before not in (None, self._plan) and self._num_plans < _PLANS:
            self._num_plans += 1
            # Calls by Python that graphs are compared with were under the plan that was best for these.
            self._ms[self.by_graphs].clear()
        self._check_earlier()
        self._judge()
        if not self._is_judged and self._earlier is None and self._has_news():
            self._predict(question)
        self._measured.launch_by_graphs(self.by_graphs)

    def note(self, call_ms: float, *, replayed: bool, is_measured: bool = False) -> None:
        """Note how long a call took. `replayed`: graphs launched some of it; `is_measured`: its layers were."""
        self._idle_calls = 0 if replayed else self._idle_calls + 1
        if replayed == self.by_graphs and not is_measured:
            self._ms[replayed].append(call_ms)
        if self._num_plans < _PLANS and len(self._ms[self.by_graphs]) >= _TRIAL:
            self._num_plans = 0

    def note_awaiting(self) -> bool:
        """Note a call that counts for nothing, as its graphs are to come; return whether there is hope of them."""
        self._idle_calls += 1
        return self._idle_calls < _PATIENCE

    def pass_over(self) -> None:
        """Note a call that is configured to have no graphs. After some of these there are none to count with."""
        self._idle_calls += 1
        if self.by_graphs and self._idle_calls >= _PATIENCE:
            self._chose_graphs, self._asked, self._earlier = False, None, None
            self._set(LaunchDecision(False, "configured"), frozenset())

    def follow(self, question: LaunchQuestion) -> None:
        """Let graphs launch what they can, as the user has configured."""
        self._plan = question.plan
        if not self._has_news():
            return
        layers = question.replayable()
        # Where memory is short, layers run without, and plans should not promise it.
        has_room = self.by_graphs or not (question.missing_bytes(layers) or 0)
        self.decision, self.layers = LaunchDecision(True, "configured"), layers if has_room else frozenset()
        self._earlier = None
        self._measured.launch_by_graphs(self.by_graphs)

    def refuse(self, reason: str) -> None:
        """Launch by Python from now on, until layers take other times."""
        self._is_judged, self._chose_graphs, self._earlier = True, False, None
        self._set(LaunchDecision(False, reason), frozenset())

    def _has_news(self) -> bool:
        """Whether plan or times have changed since this was asked last; not until the first calls are measured."""
        asked = self._plan, self._measured.num_drifts, self._measured.estimator.samples
        if self._measured.is_young() or asked == self._asked:
            return False
        self._asked = asked
        return True

    def _forget_calls(self) -> None:
        self._ms = {by_graphs: deque(maxlen=_WINDOW) for by_graphs in (False, True)}
        self._num_plans = self._idle_calls = 0

    @property
    def _has_base(self) -> bool:
        """Whether there are calls by Python to compare graphs with."""
        return not self._is_timed or len(self._ms[False]) >= _TRIAL

    def _check_earlier(self) -> None:
        """Once calls are timed, believe what an earlier process has measured if they take what they took there."""
        earlier = self._earlier
        if earlier is None or len(self._ms[earlier.by_graphs]) < _TRIAL:
            return
        self._earlier = None
        if abs(median(self._ms[earlier.by_graphs]) - earlier.ms) > _SAME * earlier.ms:
            self._asked = None
        elif earlier.by_graphs:
            self._ms[False].extend([earlier.eager_ms] * _TRIAL)
        else:
            self._is_judged = True

    def _judge(self) -> None:
        """Go back to Python if calls by graphs were no faster, if there were none, or none by Python before."""
        if not self.by_graphs or self._is_judged:
            return
        by_graphs = self._ms[True]
        if not self._has_base and self._earlier is None:
            self._asked = None
            self._set(LaunchDecision(False, "calls without graphs are to be timed first"), frozenset())
        elif self._idle_calls >= _PATIENCE:
            self.refuse(f"graphs launched nothing in {_PATIENCE} calls")
        elif len(by_graphs) >= _TRIAL:
            found = KeptLaunch(self.layers, graphs_ms=median(by_graphs), eager_ms=median(self._ms[False]))
            if found.graphs_ms > (1 - GRAPH_GAIN) * found.eager_ms:
                found = replace(found, layers=frozenset())
                self.refuse(str(found))
            else:
                self._is_judged = True
                self._set(LaunchDecision(True, str(found)), self.layers)
            self._kept.keep_launch(found)

    def _predict(self, question: LaunchQuestion) -> None:
        layers = question.replayable()
        if not (layers and self._has_base):
            # What layers do may not have been seen yet.
            self._asked = None
        if not self._has_base:
            return
        times = launch_times(question.tasks, self._measured, layers)
        if times is None:
            return
        reason = self._against(times, question, layers)
        self._chose_graphs = reason is None
        decision = LaunchDecision(reason is None, reason or str(times))
        self._set(decision, frozenset() if reason else layers)

    def _against(self, times: LaunchTimes, question: LaunchQuestion, layers: frozenset[int]) -> str | None:
        if not times.bounds(_STAYS if self._chose_graphs else _BOUND):
            return str(times)
        if times.replayed < _LEAST_PART:
            return f"graphs would take over {times.replayed:.0%} of launching"
        # Graphs that are there have their memory.
        missing = 0 if self.by_graphs else question.missing_bytes(layers)
        if missing is None:
            return "device memory is not measured yet"
        return f"graphs lack {missing / 1e9:.1f} GB of device memory" if missing > 0 else None

    def _set(self, decision: LaunchDecision, layers: frozenset[int]) -> None:
        before, self.decision, self.layers = self.decision, decision, layers
        if before is None or before.by_graphs != decision.by_graphs:
            self._num_plans = self._idle_calls = 0
            self._ms[decision.by_graphs].clear()
            _LOG.info("%s: launch %s", self._measured.what, decision)
