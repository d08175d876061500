"""`simulate`: run task lists against costs and limits, and record a timeline."""

from collections.abc import Iterable, Iterator, Sequence

from rp_sched.problem.costs import NO_LIMITS, LayerCost, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.tasks import Task, check_order
from rp_sched.problem.validation import check_problem, check_steps
from rp_sched.simulation.clock import Clock, Ran
from rp_sched.simulation.host_memory import Host
from rp_sched.simulation.peak_memory import Holding, peak
from rp_sched.simulation.stage_costs import Load, Loads
from rp_sched.simulation.timeline import Idle, Reason, Span, Timeline


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
    `Dealer`, the classic schedules or your own code. The rules are in `rp_sched.simulation.clock`. Tasks that
    exceed device memory are simulated all the same: check `peak_bytes`.

    Raises `InvalidOrder` for a list that cannot run in its order.
    """
    check_problem(costs, devices=devices, microbatches=microbatches, mode=mode)
    if not calls:
        raise ValueError("calls must have at least one task list, but is empty")
    # What is no task is refused next.
    spans = (task.microbatches for tasks in calls for task in tasks if type(task) is Task)
    check_steps(sum(span.stop - span.start for span in spans))
    for tasks in calls:
        check_order(tasks, len(costs), microbatches, mode, devices=devices)
    player = _Player(Loads(costs, limits), devices, microbatches, mode)
    for tasks in calls:
        player.play(tasks)
    return player.timeline()


class _Player:
    """A clock, and the record of what it simulated."""

    def __init__(self, loads: Loads, devices: int, microbatches: int, mode: Mode) -> None:
        self._loads = loads
        self._microbatches = microbatches
        self._mode: Mode = mode
        self._clock = Clock.idle(devices)
        self._spans: list[Span] = []
        self._idle: list[Idle] = []
        self._launches: list[float] = []
        self._launch_ms = 0.0
        self._host = Host(loads)
        self._held: list[list[Holding]] = [[] for _ in range(devices)]
        # When each device was last busy, and when everything ended, from the launch of the first call on.
        self._ends = [0.0] * devices
        self._over_ms = 0.0
        # When each microbatch may start its next stage, and when its last one ended.
        self._ready = [0.0] * microbatches
        self._done = [0.0] * microbatches

    def play(self, tasks: Sequence[Task]) -> None:
        if self._launches:
            self._launch_ms += self._clock.next_call()
        self._launches.append(self._launch_ms)
        self._host.next_call(tasks)
        saved = sorted({task.layers.start for task in tasks if task.runs_backward})
        self._ready = [0.0] * self._microbatches
        self._done = [0.0] * self._microbatches
        for task, before in zip(tasks, (None, *tasks), strict=False):
            begins_backward = before is not None and before.runs_forward and task.runs_backward
            if self._mode == "train" and begins_backward:
                self._open_gate()
            self._run(task, self._loads.of(task.kind, task.layers, saved))

    def timeline(self) -> Timeline:
        self._note_ends()
        devices = range(len(self._ends))
        return Timeline(
            spans=tuple(self._spans),
            idle=tuple(self._idle),
            launches=tuple(self._launches),
            makespan_ms=self._over_ms,
            busy_ms=tuple(self._busy_ms(device) for device in devices),
            peak_bytes=tuple(peak(self._held[device]) for device in devices),
            host_peak_bytes=self._host.peak_bytes(),
        )

    def _open_gate(self) -> None:
        """Let the backward pass start when the caller has all outputs (mode `train`)."""
        self._ready = [self._clock.results_ms] * self._microbatches
        self._done = list(self._ready)

    def _run(self, task: Task, load: Load) -> None:
        clock, ready = self._clock, list(self._ready)
        # A device that was free before the launch has been idle since its last task ended.
        free_ms = clock.free[task.device] or self._ends[task.device] - self._launch_ms
        ran = clock.run(load, task.microbatches, task.device, self._ready, self._loads.limits)
        clock.results_ms = max(clock.results_ms, ran.end_ms + load.results_after_ms)
        clock.over_ms = max(clock.over_ms, ran.over_ms)
        self._over_ms = max(self._over_ms, self._launch_ms + max(clock.over_ms, clock.results_ms))
        self._note_idle(task, ran, ready, free_ms)
        self._note_span(task, ran)
        self._note_held(task, ran, load)

    def _note_span(self, task: Task, ran: Ran) -> None:
        at = self._launch_ms
        times = tuple((at + start, at + end) for start, end in ran.microbatches)
        marks = (at + ms for ms in (ran.fetch_ms, ran.fetched_ms, ran.left_ms))
        self._spans.append(Span(len(self._launches) - 1, task, times, *marks))
        self._ends[task.device] = times[-1][1]
        self._host.note(task, [end for _, end in times])

    def _note_idle(self, task: Task, ran: Ran, ready: Sequence[float], free_ms: float) -> None:
        for microbatch, (start_ms, end_ms) in zip(task.microbatches, ran.microbatches, strict=True):
            waits = _waits(free_ms, start_ms, ready[microbatch], self._done[microbatch], ran)
            self._note_waits(task.device, waits)
            self._done[microbatch] = free_ms = end_ms

    def _note_waits(self, device: int, waits: Iterable[tuple[float, float, Reason]]) -> None:
        at = self._launch_ms
        self._idle += [Idle(device, at + begin, at + end, why) for begin, end, why in waits if end > begin]

    def _note_held(self, task: Task, ran: Ran, load: Load) -> None:
        at, first_ms = self._launch_ms, ran.microbatches[0][0]
        weights = load.state_bytes - load.gradient_bytes
        self._held[task.device] += [
            (at + ran.fetch_ms, at + ran.end_ms, weights),
            (at + first_ms, at + ran.left_ms, load.gradient_bytes),
            (at + first_ms, at + ran.end_ms, load.kept_bytes),
        ]

    def _note_ends(self) -> None:
        for device, end_ms in enumerate(self._ends):
            if self._over_ms > end_ms:
                self._idle.append(Idle(device, end_ms, self._over_ms, "end"))

    def _busy_ms(self, device: int) -> float:
        mine = (span.microbatches for span in self._spans if span.task.device == device)
        return sum(end - start for times in mine for start, end in times)


def _waits(
    free_ms: float, start_ms: float, ready_ms: float, done_ms: float, ran: Ran
) -> Iterator[tuple[float, float, Reason]]:
    """Why a device was idle from `free_ms` to `start_ms`, in ms from the launch of the call."""
    launched_ms = max(free_ms, 0.0)
    yield free_ms, launched_ms, "launch"
    if start_ms <= launched_ms:
        return
    if start_ms == ready_ms:
        arrived_ms = max(launched_ms, done_ms)
        yield launched_ms, arrived_ms, "stage before"
        yield arrived_ms, start_ms, "hop"
    else:
        yield launched_ms, start_ms, "weights" if start_ms == ran.fetched_ms else "memory"
