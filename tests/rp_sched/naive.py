"""The slow truth: every time is the recursive definition of it, and every question is asked anew.

It shares no line with the simulator: it adds up costs layer by layer, looks for what a microbatch waits for among
all tasks, and knows nothing of an order in which times could be computed.
"""

from collections.abc import Sequence
from functools import cache

from rp_sched import LayerCost, Limits, Plan, Task

Where = tuple[int, int]
"""Call and position of a task."""


class Naive:
    """Calls with their task lists."""

    def __init__(
        self,
        calls: Sequence[Sequence[Task]],
        costs: Sequence[LayerCost],
        microbatches: int,
        mode: str,
        limits: Limits,
    ) -> None:
        self.calls = [list(tasks) for tasks in calls]
        self.costs = costs
        self.microbatches = microbatches
        self.mode = mode
        self.limits = limits
        # The definitions below are plain; only their answers are kept.
        for name in ("launch", "end", "start", "left", "fetched", "up_free", "down_free", "fetch_start"):
            setattr(self, name, cache(getattr(self, name)))

    # What tasks are

    def task(self, at: Where) -> Task:
        return self.calls[at[0]][at[1]]

    def all_tasks(self) -> list[Where]:
        return [(call, index) for call, tasks in enumerate(self.calls) for index in range(len(tasks))]

    def before(self, at: Where) -> Where | None:
        """The task before, on the same device and so on the same link."""
        earlier = [
            other for other in self.all_tasks() if other < at and self.task(other).device == self.task(at).device
        ]
        return max(earlier, default=None)

    def ms(self, task: Task) -> float:
        forward = sum(self.costs[layer].forward_ms for layer in task.layers)
        return forward if task.kind == "F" else forward + self.backward_ms(task)

    def backward_ms(self, task: Task) -> float:
        return sum(self.costs[layer].backward_ms for layer in task.layers)

    def weights(self, task: Task) -> int:
        return sum(self.costs[layer].weight_bytes for layer in task.layers)

    def gradients(self, task: Task) -> int:
        return 0 if task.kind == "F" else sum(2 * self.costs[layer].trainable_bytes for layer in task.layers)

    def kept(self, task: Task) -> int:
        return 0 if task.kind == "F" else sum(self.costs[layer].kept_bytes for layer in task.layers)

    def handed(self, boundary: int) -> int:
        """Bytes that come into a layer; of the model's input nothing is known."""
        return self.costs[boundary - 1].boundary_bytes if boundary else 0

    def up_ms(self, size: float) -> float:
        return size / (self.limits.upload_gb_s * 1e6) if self.limits.upload_gb_s else 0.0

    def down_ms(self, size: float) -> float:
        return size / (self.limits.download_gb_s * 1e6) if self.limits.download_gb_s else 0.0

    def hop_ms(self, task: Task) -> float:
        size = self.handed(task.layers.stop if task.kind == "F" else task.layers.start)
        return self.limits.hop_ms + self.up_ms(size) + self.down_ms(size)

    def inputs(self, task: Task) -> int:
        return self.handed(task.layers.start) + (self.handed(task.layers.stop) if task.kind == "B" else 0)

    def outputs(self, at: Where) -> int:
        task = self.task(at)
        if task.kind != "F":
            return self.handed(task.layers.start)
        saved = {other.layers.start for other in self.calls[at[0]] if other.kind != "F"}
        return self.handed(task.layers.stop) + sum(self.handed(s) for s in saved if s in task.layers[1:])

    # When things happen

    def launch(self, call: int) -> float:
        if call == 0:
            return 0.0
        over = self.over(call - 2) if call > 1 else 0.0
        return max(self.results(call - 1), over, self.launch(call - 1))

    def results(self, call: int) -> float:
        kind = "FB" if self.mode == "fused" else "F"
        found = [(call, index) for index, task in enumerate(self.calls[call]) if task.kind == kind]
        return max(self.result(at) for at in found)

    def result(self, at: Where) -> float:
        task = self.task(at)
        end = self.end(at, task.microbatches[-1])
        return end - self.backward_ms(task) if task.kind == "FB" else end + self.hop_ms(task)

    def over(self, call: int) -> float:
        every = [(call, index) for index in range(len(self.calls[call]))]
        return max(max(self.left(at), self.sent(at)) for at in every)

    def end(self, at: Where, microbatch: int) -> float:
        return self.start(at, microbatch) + self.ms(self.task(at))

    def start(self, at: Where, microbatch: int) -> float:
        task = self.task(at)
        waits = [self.ready(at, microbatch)]
        if microbatch > task.microbatches[0]:
            waits.append(self.end(at, microbatch - 1))
        else:
            waits += [self.launch(at[0]), self.fetched(at), self.cleared(at), self.device_free(at)]
        return max(waits)

    def device_free(self, at: Where) -> float:
        before = self.before(at)
        return 0.0 if before is None else self.end(before, self.task(before).microbatches[-1])

    def ready(self, at: Where, microbatch: int) -> float:
        task, call = self.task(at), at[0]
        if self.mode == "train" and task.kind == "B" and task.layers.stop == len(self.costs):
            return self.results(call)
        if task.kind != "B" and task.layers.start == 0:
            return 0.0
        (maker,) = [
            (call, index)
            for index, other in enumerate(self.calls[call])
            if microbatch in other.microbatches and _feeds(other, task)
        ]
        return self.end(maker, microbatch) + self.hop_ms(self.task(maker))

    def fetched(self, at: Where) -> float:
        return self.fetch_start(at) + self.up_ms(self.weights(self.task(at)))

    def fetch_start(self, at: Where) -> float:
        return max(self.launch(at[0]), self.room(at), self.up_free(self.before(at)))

    def up_free(self, at: Where | None) -> float:
        if at is None:
            return 0.0
        task = self.task(at)
        return self.fetched(at) + len(task.microbatches) * self.up_ms(self.inputs(task))

    def room(self, at: Where) -> float:
        task, before = self.task(at), self.before(at)
        if before is None:
            return 0.0
        held = sum(size(self.task(before)) for size in (self.weights, self.gradients, self.kept))
        if self.fits(held + self.weights(task) + self.gradients(task)):
            before = self.before(before)
        return 0.0 if before is None else self.left(before)

    def cleared(self, at: Where) -> float:
        task, before = self.task(at), self.before(at)
        if before is None:
            return 0.0
        held = self.weights(task) + self.gradients(task) + self.kept(task)
        return 0.0 if self.fits(held + self.gradients(self.task(before))) else self.left(before)

    def fits(self, size: int) -> bool:
        return self.limits.device_memory_bytes is None or size <= self.limits.device_memory_bytes

    def left(self, at: Where) -> float:
        task = self.task(at)
        end = self.end(at, task.microbatches[-1])
        trainable = 0 if task.kind == "F" else sum(self.costs[layer].trainable_bytes for layer in task.layers)
        return max(end, self.sent(at)) + self.down_ms(trainable) if self.down_ms(trainable) else end

    def sent(self, at: Where) -> float:
        task = self.task(at)
        begin = max(self.down_free(self.before(at)), self.start(at, task.microbatches[0]))
        return begin + len(task.microbatches) * self.down_ms(self.outputs(at))

    def down_free(self, at: Where | None) -> float:
        if at is None:
            return 0.0
        return max(self.sent(at), self.left(at)) if self.left_over_link(at) else self.sent(at)

    def left_over_link(self, at: Where) -> bool:
        task = self.task(at)
        return (
            task.kind != "F" and self.down_ms(sum(self.costs[layer].trainable_bytes for layer in task.layers)) > 0
        )


def _feeds(maker: Task, task: Task) -> bool:
    if task.kind == "B":
        return maker.kind != "F" and maker.layers.start == task.layers.stop
    return maker.kind == "F" and maker.layers.stop == task.layers.start


def written_out(plan: Plan, microbatches: int) -> list[tuple[str, range, range]]:
    """The tasks of a call without devices."""
    whole = (range(microbatches),)
    tasks = [("F", layers, batch) for layers in plan.forward for batch in plan.forward_groups or whole]
    if plan.fused is not None:
        tasks += [("FB", plan.fused, batch) for batch in plan.groups or whole]
    return tasks + [("B", layers, batch) for layers in plan.backward for batch in plan.backward_groups or whole]


def deal(
    plan: Plan,
    calls: int,
    costs: Sequence[LayerCost],
    *,
    devices: int,
    microbatches: int,
    mode: str,
    limits: Limits,
) -> Naive:
    """Calls of a plan whose tasks each go to the device that frees first, found by playing all tasks before it.

    A device that is free at the launch of its call is as good as any other that is. Only where links take no time:
    there the times of tasks do not depend on later ones.
    """
    assert limits.upload_gb_s is None
    assert limits.download_gb_s is None
    played = Naive([], costs, microbatches, mode, limits)
    for _ in range(calls):
        deal_another(played, plan, devices)
    return played


def deal_another(played: Naive, plan: Plan, devices: int) -> None:
    """One more call."""
    used = min(devices, plan.devices or devices)
    call = len(played.calls)
    played.calls.append([])
    for kind, layers, batch in written_out(plan, played.microbatches):
        number = sum(map(len, played.calls))
        device = number % used if plan.in_turn else _first_free(played, call, used)
        played.calls[call].append(Task(kind, layers, batch, device))


def _first_free(played: Naive, call: int, devices: int) -> int:
    free = _free(played, played.launch(call), devices)
    return free.index(min(free))


def _free(played: Naive, launch: float, devices: int) -> list[float]:
    free = [launch] * devices
    for at in played.all_tasks():
        task = played.task(at)
        free[task.device] = max(launch, played.end(at, task.microbatches[-1]))
    return free


def steady_ms(
    plan: Plan, costs: Sequence[LayerCost], *, devices: int, calls: int = 40, **how: object
) -> float | None:
    """The mean time from launch to launch, once devices stand as they stood before; None if they do not soon."""
    played = deal(plan, 0, costs, devices=devices, **how)  # type: ignore[arg-type]
    seen: list[tuple[object, float]] = []
    for count in range(1, calls):
        deal_another(played, plan, devices)
        launch = played.launch(count)
        standing = _standing(played, launch, plan, devices)
        for ago, (before, then) in enumerate(reversed(seen), 1):
            if before == standing:
                return (launch - then) / ago
        seen.append((standing, launch))
    return None


def _standing(played: Naive, launch: float, plan: Plan, devices: int) -> object:
    used = min(devices, plan.devices or devices)
    free = [ms - launch for ms in _free(played, launch, used)]
    turn = sum(map(len, played.calls)) % used
    over = max(0.0, played.over(len(played.calls) - 1) - launch)
    return over, (free[turn:] + free[:turn] if plan.in_turn else sorted(free))
