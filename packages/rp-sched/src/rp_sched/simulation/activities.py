"""The activities of calls: what each task fetches, computes and sends, and what these wait for and share."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rp_sched.problem.tasks import Task
from rp_sched.simulation.clock import has_room_beside, is_clear, waits_to_leave
from rp_sched.simulation.fluid import Activity, Fluid
from rp_sched.simulation.resources import DISK, GIL, OPTIMIZER, DeviceRates, Rate, Resource
from rp_sched.simulation.stage_costs import Load, Loads, Sums

# The directions of a link.
UP, DOWN = range(2)
_Result = TypeVar("_Result")

After = list[tuple[Activity, float]]
"""Activities that another one waits for, each with a delay in ms."""


@dataclass(slots=True)
class Microbatch:
    """One microbatch of a task. `feed`: the microbatch in the stage before, if any, and the hop from it, in ms.

    `parts`: its computing, cut where losses are ready or where the backward pass waits for memory.
    """

    feed: tuple[Activity, float] | None
    parts: list[Activity]


@dataclass(slots=True)
class Played:
    """The activities of one task.

    `compute_ms`: the compute time of a microbatch on its device. `steps`: the optimizer's work that its weights
    wait for. `leaving`: the download of its gradients, if that takes time. `before_end`, `before_left`: the end of
    the task before on the same device, and when its gradients had left.
    """

    call: int
    task: Task
    load: Load
    compute_ms: float
    launch: Activity
    before_end: Activity | None
    before_left: Activity | None
    steps: list[Activity]
    fetch: Activity
    begin: Activity
    microbatches: list[Microbatch]
    outputs: Activity
    leaving: Activity | None

    @property
    def end(self) -> Activity:
        """Its last computing."""
        return self.microbatches[-1].parts[-1]

    @property
    def left(self) -> Activity:
        """What ends when its gradients have left the device."""
        return self.leaving or self.end


@dataclass(slots=True)
class SimulatedCall:
    """One call: its launch, its tasks, when the caller has results, and the last step of each layer's weights."""

    number: int
    launch: Activity
    tasks: list[Played] = field(default_factory=list[Played])
    results: After = field(default_factory=After)
    steps: dict[int, Activity] = field(default_factory=dict[int, Activity])


class Calls:
    """Calls that follow each other, as activities of a `Fluid`; the rules are those of `Clock`."""

    def __init__(self, loads: Loads, devices: int) -> None:
        self.fluid = Fluid()
        self._loads = loads
        self._resources = loads.resources(devices)
        self._last: list[Played | None] = [None] * devices
        self._up: list[Activity | None] = [None] * devices
        self._down: list[Activity | None] = [None] * devices
        self._step: Activity | None = None
        self._calls: list[SimulatedCall] = []
        self._count = 0
        # How long each device, link and shared resource was busy.
        self._busy_ms: dict[tuple[Resource, int], float] = {}

    def launch(self, tasks: Sequence[Task], microbatches: int, *, gated: bool) -> SimulatedCall:
        """Add a call. `gated`: the backward pass starts when the caller has all outputs."""
        return result_of(self.launching(tasks, microbatches, gated=gated))

    def launching(
        self, tasks: Sequence[Task], microbatches: int, *, gated: bool
    ) -> Generator[None, None, SimulatedCall]:
        """`launch` in small parts."""
        launch = self._launch()
        while launch.end_ms is None:
            self.fluid.step()
            yield
        call = SimulatedCall(self._count, launch)
        self._count += 1
        self._calls = [*self._calls[-2:], call]
        sums, feeds = list(_sums(tasks)), _Feeds(microbatches)
        saved = sorted({task.layers.start for task in tasks if task.runs_backward})
        adders: dict[int, list[Activity]] = {}
        before: Task | None = None
        for task, joins in zip(tasks, sums, strict=True):
            if gated and before is not None and before.runs_forward and task.runs_backward:
                feeds.gate(self.fluid.add(0.0, after=call.results))
            load = self._load(task, saved, joins)
            played = self._play(call, task, load, feeds)
            call.tasks.append(played)
            self._add_step(call, played, adders)
            before = task
            yield
        return call

    def busy_ms(self) -> dict[Resource, float]:
        """How long the busiest device, link and so on worked, at full speed."""
        found: dict[Resource, float] = {}
        for (resource, _), ms in self._busy_ms.items():
            found[resource] = max(ms, found.get(resource, 0.0))
        return found

    def _launch(self) -> Activity:
        after: After = []
        if self._calls:
            after += [(self._calls[-1].launch, 0.0), *self._calls[-1].results]
        for played in self._calls[-2].tasks if len(self._calls) > 1 else ():
            after += [(played.left, 0.0), (played.outputs, 0.0)]
        return self.fluid.add(0.0, after=after)

    def _load(self, task: Task, saved: Sequence[int], joins: Sequence[tuple[range, Sums]]) -> Load:
        load = self._loads.of(task.kind, task.layers, saved)
        if not joins:
            return load
        sent, added, stepped = zip(*(self._loads.leaving(*join) for join in joins), strict=True)
        return load._replace(sent_bytes=sum(sent), added_bytes=sum(added), step_bytes=sum(stepped))

    def _play(self, call: SimulatedCall, task: Task, load: Load, feeds: "_Feeds") -> Played:
        device, add = task.device, self.fluid.add
        lane, last = self._resources.lanes[device], self._last[device]
        launched: After = [(call.launch, 0.0)]
        steps = self._steps(task)
        fetch_after = [*launched, *_after(self._up[device], *steps, self._room(load, lane, last))]
        disk_ms = self._resources.disk_ms * load.disk_bytes / max(load.weight_bytes, 1)
        fetch = self._move(load.weight_bytes, lane.up.beside(DISK, disk_ms), device, fetch_after)
        inputs = self._move(len(task.microbatches) * load.input_bytes, lane.up, device, [(fetch, 0.0)])
        feed = feeds.of(task.microbatches[0])
        end = None if last is None else last.end
        begin_after = [*launched, *feed, *_after(fetch, end, self._cleared(load, lane, last))]
        begin = add(0.0, after=begin_after)
        microbatches = list(self._compute(task, load, lane, begin, feeds))
        outputs_after = [(begin, 0.0), *_after(self._down[device])]
        outputs = self._move(
            len(task.microbatches) * load.output_bytes, lane.down, device, outputs_after, way=DOWN
        )
        leaving = self._leave(load, lane, device, [(outputs, 0.0), (microbatches[-1].parts[-1], 0.0)])
        self._up[device], self._down[device] = inputs, leaving or outputs
        ms = load.ms * lane.slowdown
        left = None if last is None else last.left
        played = Played(
            *(call.number, task, load, ms, call.launch, end, left, steps, fetch, begin, microbatches),
            *(outputs, leaving),
        )
        self._last[device] = played
        call.results += _results(load, microbatches[-1])
        return played

    def _steps(self, task: Task) -> list[Activity]:
        """The steps that write the weights that a task reads: those of the call before the last."""
        if len(self._calls) < 3:
            return []
        steps = self._calls[-3].steps
        return list(dict.fromkeys(steps[layer] for layer in task.layers if layer in steps))

    def _room(self, load: Load, lane: DeviceRates, last: Played | None) -> Activity | None:
        if last is None:
            return None
        held = last.load.state_bytes + last.load.kept_bytes
        if not has_room_beside(load, held, lane.memory_bytes):
            return last.left
        return last.before_left

    def _cleared(self, load: Load, lane: DeviceRates, last: Played | None) -> Activity | None:
        if last is None or is_clear(load, last.load.gradient_bytes, lane.memory_bytes):
            return None
        return last.left

    def _compute(
        self, task: Task, load: Load, lane: DeviceRates, begin: Activity, feeds: "_Feeds"
    ) -> Iterator[Microbatch]:
        last = self._last[task.device]
        waits = last is not None and waits_to_leave(load, last.load.gradient_bytes, self._resources)
        full_ms = load.step_on(lane.slowdown)
        held_ms = load.launch_ms * self._loads.limits.host.launch_gil_share
        shares = [(GIL, held_ms / full_ms)] if held_ms else []
        self._note("device", task.device, len(task.microbatches) * load.ms * lane.slowdown)
        self._note("GIL", 0, len(task.microbatches) * held_ms)
        before = begin
        for microbatch in task.microbatches:
            feed = feeds.of(microbatch)
            after: After = [(before, 0.0), *feed]
            first, final = microbatch == task.microbatches[0], microbatch == task.microbatches[-1]
            parts: list[Activity] = []
            if (first and waits) or (final and load.kind.computes_loss):
                forward_ms = full_ms - load.backward_part * full_ms
                parts.append(self.fluid.add(forward_ms, shares, after))
                after = [(parts[0], 0.0), *_after(last.left if last is not None and first and waits else None)]
                parts.append(self.fluid.add(full_ms - forward_ms, shares, after))
            else:
                parts.append(self.fluid.add(full_ms, shares, after))
            before = parts[-1]
            feeds.set(microbatch, before, load.hop_ms)
            yield Microbatch(feed[0] if feed else None, parts)

    def _leave(self, load: Load, lane: DeviceRates, device: int, after: After) -> Activity | None:
        """The download of a task's gradients: first those that are the first of their layers."""
        leaving: Activity | None = None
        for nbytes, rate in ((load.sent_bytes - load.added_bytes, lane.down), (load.added_bytes, lane.add)):
            if nbytes and rate.alone:
                leaving = self._move(nbytes, rate, device, after, way=DOWN)
                after = [(leaving, 0.0)]
        return leaving

    def _move(self, nbytes: float, rate: Rate, device: int, after: After, *, way: int = UP) -> Activity:
        for resource, ms in rate.shared:
            self._note(self._resources.names[resource], resource, nbytes * ms)
        self._note("link", 2 * device + way, nbytes * rate.own)
        return self.fluid.add(nbytes * rate.alone, rate.shares if nbytes else (), after)

    def _add_step(self, call: SimulatedCall, played: Played, adders: dict[int, list[Activity]]) -> None:
        update = self._resources.update
        if not (played.task.adds_gradients and update.alone):
            return
        for layer in played.task.layers:
            adders.setdefault(layer, []).append(played.left)
        if played.load.step_bytes:
            left = dict.fromkeys(each for layer in played.task.layers for each in adders[layer])
            self._note("optimizer", OPTIMIZER, played.load.step_bytes * update.own)
            for resource, ms in update.shared:
                self._note(self._resources.names[resource], resource, played.load.step_bytes * ms)
            after = _after(self._step, *left)
            self._step = self.fluid.add(played.load.step_bytes * update.alone, update.shares, after)
            call.steps.update(dict.fromkeys(played.task.layers, self._step))

    def _note(self, resource: Resource, instance: int, ms: float) -> None:
        key = (resource, instance)
        self._busy_ms[key] = self._busy_ms.get(key, 0.0) + ms


def result_of(parts: Generator[None, None, _Result]) -> _Result:
    """Run a generator to its end; return its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


class _Feeds:
    """What each microbatch waits for before its next stage."""

    def __init__(self, microbatches: int) -> None:
        self._feeds: list[After] = [[] for _ in range(microbatches)]

    def of(self, microbatch: int) -> After:
        return self._feeds[microbatch]

    def set(self, microbatch: int, end: Activity, hop_ms: float) -> None:
        self._feeds[microbatch] = [(end, hop_ms)]

    def gate(self, opened: Activity) -> None:
        self._feeds = [[(opened, 0.0)] for _ in self._feeds]


def _results(load: Load, last: Microbatch) -> After:
    """When the caller has what it waits for: outputs, or losses, which precede the backward pass."""
    if load.kind.sends_outputs:
        return [(last.parts[-1], load.hop_ms)]
    return [(last.parts[0], 0.0)] if load.kind.computes_loss else []


def _after(*activities: Activity | None) -> After:
    return [(activity, 0.0) for activity in activities if activity is not None]


def _sums(tasks: Sequence[Task]) -> Iterator[list[tuple[range, Sums]]]:
    """For each task, how the gradients of its layers join those of others, in runs of layers that are alike."""
    counts: dict[int, int] = {}
    for task in tasks:
        if task.adds_gradients:
            counts.update({layer: counts.get(layer, 0) + 1 for layer in task.layers})
    done: dict[int, int] = {}
    for task in tasks:
        runs: list[tuple[range, Sums]] = []
        for layer in task.layers if task.adds_gradients else ():
            sums = Sums(counts[layer], done.get(layer, 0))
            done[layer] = sums.nth + 1
            if runs and runs[-1][1] == sums:
                runs[-1] = (range(runs[-1][0].start, layer + 1), sums)
            else:
                runs.append((range(layer, layer + 1), sums))
        yield runs
