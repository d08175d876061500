"""`simulate`: run task lists against costs and limits, and record a timeline."""

from collections.abc import Generator, Iterator, Sequence

from rp_sched.problem import bounds
from rp_sched.problem.checks import whole
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.tasks import Task, check_order
from rp_sched.problem.validation import check_problem, check_steps
from rp_sched.simulation.activities import Calls, Microbatch, Played, result_of
from rp_sched.simulation.assignment import Assigner
from rp_sched.simulation.host_memory import HostMemoryUse
from rp_sched.simulation.makespan import PricedPlan
from rp_sched.simulation.peak_memory import Holding, peak
from rp_sched.simulation.stage_costs import Loads
from rp_sched.simulation.timeline import Idle, Reason, TaskSpan, Timeline, mean_ms

# Calls simulated for a plan's time per call: the first ones differ, since nothing is under way before them.
STEADY_CALLS = 8
# Shorter waits within a microbatch, as a part of it, are rounding.
ROUNDING = 1e-12


def simulate(
    calls: Sequence[Sequence[Task]],
    costs: Sequence[LayerCost],
    *,
    devices: int,
    microbatches: int,
    mode: Mode,
    limits: Limits = NO_LIMITS,
) -> Timeline:
    """Simulate calls that follow each other, one task list per call.

    >>> tasks = [Task.parse("F[0:1] m0:2 @0"), Task.parse("FB[1:2] m0:2 @1"), Task.parse("B[0:1] m0:2 @0")]
    >>> timeline = simulate([tasks], [LayerCost(1.0, 2.0)] * 2, devices=2, microbatches=2, mode="fused")
    >>> timeline.makespan_ms, timeline.busy_ms
    (10.0, (8.0, 6.0))
    >>> [(idle.device, idle.start_ms, idle.end_ms, idle.reason) for idle in timeline.idle]
    [(1, 0.0, 1.0, 'stage before'), (0, 2.0, 4.0, 'stage before'), (1, 7.0, 10.0, 'end')]

    One list is a call alone; many lists reach the steady state. The lists may differ and may come from `order`, a
    `Assigner`, the classic schedules or your own code. The rules are in `rp_sched.simulation.clock`. Tasks that
    exceed device memory are simulated all the same: check `peak_bytes`.

    What runs at once shares the GIL, host memory, switches and adding threads (see `rp_sched.simulation.fluid`).

    Raises `InvalidOrder` for a list that cannot run in its order.
    """
    check_problem(costs, devices=devices, microbatches=microbatches, mode=mode)
    limits.check_devices(devices)
    if not calls:
        raise ValueError("calls must have at least one task list, but is empty")
    # What is no task is refused next.
    spans = (task.microbatches for tasks in calls for task in tasks if type(task) is Task)
    check_steps(sum(span.stop - span.start for span in spans))
    for tasks in calls:
        check_order(tasks, len(costs), microbatches, mode, devices=devices)
    recorder = _Recorder(Loads(costs, limits), devices)
    for tasks in calls:
        recorder.play(tasks, microbatches, gated=mode == "train")
    return recorder.timeline()


def simulated_ms(priced: PricedPlan, devices: int, *, calls: int = STEADY_CALLS) -> float:
    """The time per call of a plan by `simulate`, from launch to launch over the second half of `calls` calls.

    It is at least `PricedPlan.bound_ms`.

    >>> from rp_sched import Host, Plan
    >>> limits = Limits(upload_gb_s=1.0, host=Host(memory_gb_s=1.0))
    >>> plan = Plan(fused=range(1), groups=(range(1), range(1, 2)), in_turn=False)
    >>> costs = [LayerCost(1.0, weight_bytes=4_000_000)]
    >>> priced = PricedPlan(plan, costs, mode="fused", microbatches=2, limits=limits)
    >>> simulated_ms(priced, devices=2) >= priced.bound_ms(devices=2)
    True
    """
    whole("calls", calls, least=2, bound=bounds.CALLS)
    check_steps(calls * priced.steps)
    return result_of(simulating(priced, devices, calls=calls))


def simulating(priced: PricedPlan, devices: int, *, calls: int = STEADY_CALLS) -> Generator[None, None, float]:
    """`simulated_ms` in small parts, for callers that have other things to do meanwhile."""
    assigner, made = Assigner(devices), Calls(priced.loads, devices)
    gated = priced.mode == "train"
    launches: list[float] = []
    for _ in range(calls):
        call = yield from made.launching(assigner.assign(priced), priced.microbatches, gated=gated)
        launches.append(call.launch.ended_ms)
    # The first calls may be faster than the steady state, for example while the optimizer falls behind.
    return max(mean_ms(launches), priced.bound_ms(devices))


class _Recorder:
    """The record of simulated calls."""

    def __init__(self, loads: Loads, devices: int) -> None:
        self._calls = Calls(loads, devices)
        self._spans: list[TaskSpan] = []
        self._idle: list[Idle] = []
        self._launches: list[float] = []
        self._host = HostMemoryUse(loads)
        self._held: list[list[Holding]] = [[] for _ in range(devices)]
        self._busy = [0.0] * devices
        # When each device was last busy, and when everything ended.
        self._ends = [0.0] * devices
        self._over_ms = 0.0
        # Calls that may not have ended.
        self._open: list[tuple[Sequence[Task], list[Played]]] = []

    def play(self, tasks: Sequence[Task], microbatches: int, *, gated: bool) -> None:
        call = self._calls.launch(tasks, microbatches, gated=gated)
        self._launches.append(call.launch.ended_ms)
        self._over_ms = max(self._over_ms, call.launch.ended_ms)
        # A call is launched when that before the last one has ended, which is recorded now, so that its activities
        # are forgotten.
        if len(self._open) > 1:
            self._note_call(*self._open.pop(0))
        self._open.append((tasks, call.tasks))

    def timeline(self) -> Timeline:
        self._calls.fluid.run()
        for call in self._open:
            self._note_call(*call)
        self._note_ends()
        return Timeline(
            spans=tuple(self._spans),
            idle=tuple(self._idle),
            launches=tuple(self._launches),
            makespan_ms=self._over_ms,
            busy_ms=tuple(self._busy),
            peak_bytes=tuple(peak(held) for held in self._held),
            host_peak_bytes=self._host.peak_bytes(),
            resource_ms=self._calls.busy_ms(),
        )

    def _note_call(self, tasks: Sequence[Task], call: Sequence[Played]) -> None:
        self._host.next_call(tasks)
        for played in call:
            self._note(played)

    def _note(self, played: Played) -> None:
        task = played.task
        times = tuple((one.parts[0].start_ms, one.parts[-1].ended_ms) for one in played.microbatches)
        marks = played.fetch.start_ms, played.fetch.ended_ms, played.left.ended_ms
        self._spans.append(TaskSpan(played.call, task, times, *marks))
        self._note_idle(played)
        self._note_held(played)
        self._host.note(task, [end for _, end in times])
        self._ends[task.device] = times[-1][1]
        self._busy[task.device] += len(times) * played.compute_ms
        results_ms = times[-1][1] + played.load.hop_ms if task.sends_outputs else 0.0
        self._over_ms = max(self._over_ms, played.left.ended_ms, played.outputs.ended_ms, results_ms)

    def _note_idle(self, played: Played) -> None:
        free_ms = 0.0 if played.before_end is None else played.before_end.ended_ms
        for microbatch in played.microbatches:
            waits = [*_waits(free_ms, played, microbatch), *_within(played, microbatch)]
            device = played.task.device
            self._idle += [Idle(device, begin, end, why) for begin, end, why in waits if end > begin]
            free_ms = microbatch.parts[-1].ended_ms

    def _note_held(self, played: Played) -> None:
        first_ms, end_ms = played.microbatches[0].parts[0].start_ms, played.end.ended_ms
        load = played.load
        self._held[played.task.device] += [
            (played.fetch.start_ms, end_ms, load.state_bytes - load.gradient_bytes),
            (first_ms, played.left.ended_ms, load.gradient_bytes),
            (first_ms, end_ms, load.kept_bytes),
        ]

    def _note_ends(self) -> None:
        for device, end_ms in enumerate(self._ends):
            if self._over_ms > end_ms:
                self._idle.append(Idle(device, end_ms, self._over_ms, "end"))


def _waits(free_ms: float, played: Played, microbatch: Microbatch) -> Iterator[tuple[float, float, Reason]]:
    """Why a device was idle from `free_ms` to the start of a microbatch."""
    start_ms, launched_ms = microbatch.parts[0].start_ms, max(free_ms, played.launch.ended_ms)
    yield free_ms, launched_ms, "launch"
    if start_ms <= launched_ms:
        return
    done_ms, hop_ms = (0.0, 0.0) if microbatch.feed is None else (microbatch.feed[0].ended_ms, microbatch.feed[1])
    if start_ms == done_ms + hop_ms:
        arrived_ms = max(launched_ms, done_ms)
        yield launched_ms, arrived_ms, "stage before"
        yield arrived_ms, start_ms, "hop"
    elif start_ms == played.fetch.ended_ms:
        stepped_ms = max((step.ended_ms for step in played.steps), default=0.0)
        written_ms = max(launched_ms, stepped_ms) if played.fetch.start_ms == stepped_ms else launched_ms
        yield launched_ms, written_ms, "optimizer"
        yield written_ms, start_ms, "weights"
    else:
        yield launched_ms, start_ms, "memory"


def _within(played: Played, microbatch: Microbatch) -> Iterator[tuple[float, float, Reason]]:
    """Why a device was idle within a microbatch: it waited for memory, or for its launching."""
    parts = microbatch.parts
    late_ms = 0.0
    if len(parts) > 1:
        yield parts[0].ended_ms, parts[1].start_ms, "memory"
        late_ms = parts[1].start_ms - parts[0].ended_ms
    computing_ms = parts[-1].ended_ms - parts[0].start_ms - late_ms
    slack_ms = computing_ms - played.compute_ms
    # Sums of times may differ by rounding.
    if slack_ms > ROUNDING * computing_ms:
        yield parts[-1].ended_ms - slack_ms, parts[-1].ended_ms, "GIL"
