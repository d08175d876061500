"""Schedules from papers (GPipe, 1F1B and others) as task lists, for comparison.

Each stage is bound to a device: device d runs stages d, d + devices, and so on. The last stage runs forward and
backward in one task, as in the engine; every other backward pass recomputes. Stages are listed from the first
layer on. A task runs one microbatch unless its schedule's docstring says otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from rp_sched.errors import InvalidPlan
from rp_sched.planners.partition import backward_row, even, fewest, least_cap
from rp_sched.problem import bounds
from rp_sched.problem.checks import at_most, whole
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import TaskKind
from rp_sched.problem.tasks import Task
from rp_sched.simulation.stage_costs import Loads

Schedule = Callable[[Sequence[range], int, int], tuple[Task, ...]]


def even_stages(costs: Sequence[LayerCost], stages: int) -> tuple[range, ...]:
    """Cut all layers into `stages` stages of about equal time, or one stage per layer if there are fewer layers.

    >>> even_stages([LayerCost(1.0), LayerCost(1.0), LayerCost(2.0)], 2)
    (range(0, 2), range(2, 3))
    """
    row = backward_row(Loads(costs, NO_LIMITS), 1)
    end = row.num_layers
    count = min(whole("stages", stages, least=1), end)
    cap_ms = least_cap(lambda cap: fewest(row, end, cap), count, row.slowest_layer_ms, row.stage_ms(range(end)))
    return even(row, end, count, cap_ms)


def gpipe(stages: Sequence[range], devices: int, microbatches: int) -> tuple[Task, ...]:
    """Run all microbatches forward, then all backward.

    >>> gpipe([range(0, 1), range(1, 2)], 2, 2)
    (F[0:1] m0:1 @0, F[0:1] m1:2 @0, FB[1:2] m0:1 @1, FB[1:2] m1:2 @1, B[0:1] m0:1 @0, B[0:1] m1:2 @0)

    Source: Huang et al., "GPipe", 2019.
    """
    _check(stages, devices, microbatches)
    singles = [range(m, m + 1) for m in range(microbatches)]
    return tuple(_bound_to_devices(stages, devices, singles))


def looped_bfs(stages: Sequence[range], devices: int, microbatches: int) -> tuple[Task, ...]:
    """Run all microbatches of a stage in one task before the device starts its next stage.

    >>> looped_bfs([range(0, 1), range(1, 2)], 2, 2)
    (F[0:1] m0:2 @0, FB[1:2] m0:2 @1, B[0:1] m0:2 @0)

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023.
    """
    _check(stages, devices, microbatches)
    return tuple(_bound_to_devices(stages, devices, [range(microbatches)]))


def one_f_one_b(stages: Sequence[range], devices: int, microbatches: int) -> tuple[Task, ...]:
    """Alternate between forward and backward on each device as early as possible.

    >>> one_f_one_b([range(0, 1), range(1, 2)], 2, 2)
    (F[0:1] m0:1 @0, FB[1:2] m0:1 @1, F[0:1] m1:2 @0, FB[1:2] m1:2 @1, B[0:1] m0:1 @0, B[0:1] m1:2 @0)

    Needs a device for each stage. Source: Narayanan et al., "PipeDream", 2019, without weight versions.
    """
    _check(stages, devices, microbatches)
    if len(stages) > devices:
        raise ValueError(
            f"1F1B needs a device for each stage, but got {len(stages)} stages for {devices} devices; merge stages"
        )
    return interleaved(stages, len(stages), microbatches)


def interleaved(stages: Sequence[range], devices: int, microbatches: int) -> tuple[Task, ...]:
    """Run 1F1B with several stages per device, which run microbatches in groups of `devices`.

    >>> len(interleaved([range(layer, layer + 1) for layer in range(4)], 2, 2))
    14

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021. As there, with
    several stages per device, the stages and the microbatches must be multiples of devices; else raises
    `ValueError`.
    """
    _check(stages, devices, microbatches)
    if len(stages) != devices and (len(stages) % devices or microbatches % devices):
        raise ValueError(
            f"with several stages per device, stages and microbatches must be multiples of devices ({devices}), "
            f"but are {len(stages)} and {microbatches} instead"
        )
    queues = [_in_turn(stages, devices, microbatches, device) for device in range(devices)]
    return tuple(_merged(queues))


def _check(stages: Sequence[range], devices: int, microbatches: int) -> None:
    whole("devices", devices, least=1, bound=bounds.DEVICES)
    whole("microbatches", microbatches, least=1, bound=bounds.MICROBATCHES)
    if not stages:
        raise InvalidPlan("stages must have at least one stage, but is empty")
    at_most("twice the stages times microbatches", 2 * len(stages) * microbatches, bounds.TASKS)
    # Reuse the plan's check for gaps, overlaps and empty stages.
    Plan(tuple(stages)).check(max(stages[-1].stop, 1), "infer")


def _bound_to_devices(stages: Sequence[range], devices: int, batches: Sequence[range]) -> Iterator[Task]:
    last = len(stages) - 1
    for number, layers in enumerate(stages):
        kind = TaskKind.FUSED if number == last else TaskKind.FORWARD
        yield from (Task(kind, layers, batch, number % devices) for batch in batches)
    for number in range(last - 1, -1, -1):
        yield from (Task(TaskKind.BACKWARD, stages[number], batch, number % devices) for batch in batches)


def _in_turn(stages: Sequence[range], devices: int, microbatches: int, device: int) -> Iterator[Task]:
    """Yield a device's tasks: warm-up forwards, alternating forwards and backwards, remaining backwards."""
    mine = range(device, len(stages), devices)
    forward = list(_visits(mine, devices, microbatches))
    backward = list(_visits(mine[::-1], devices, microbatches))
    ahead = devices - 1 - device
    if len(mine) > 1:
        ahead = 2 * ahead + (len(mine) - 1) * devices
    first = min(ahead, len(forward))
    up = [_step(stages, TaskKind.FORWARD, visit, device) for visit in forward]
    down = [_step(stages, TaskKind.BACKWARD, visit, device) for visit in backward]
    later = chain.from_iterable(zip(up[first:], down, strict=False))
    steps = chain(up[:first], later, down[len(up) - first :])
    yield from (task for task in steps if task is not None)


def _step(stages: Sequence[range], kind: TaskKind, visit: tuple[int, int], device: int) -> Task | None:
    """Return a step's task. The last stage runs both directions in its forward step and has no backward step."""
    number, microbatch = visit
    if number == len(stages) - 1:
        if kind.runs_backward:
            return None
        kind = TaskKind.FUSED
    return Task(kind, stages[number], range(microbatch, microbatch + 1), device)


def _visits(mine: Iterable[int], devices: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Yield (stage, microbatch) of each step in one direction: groups of microbatches run through all stages."""
    for start in range(0, microbatches, devices):
        for number in mine:
            for microbatch in range(start, min(start + devices, microbatches)):
                yield number, microbatch


def _merged(queues: Sequence[Iterator[Task]]) -> Iterator[Task]:
    """Merge the devices' queues into one list, each task after the tasks it depends on."""
    heads = [next(queue, None) for queue in queues]
    done: set[tuple[str, int, int]] = set()
    while any(head is not None for head in heads):
        before = len(done)
        for device, head in enumerate(heads):
            if head is not None and _can_run(head, done):
                yield head
                done |= _marks(head)
                heads[device] = next(queues[device], None)
        if len(done) == before:
            raise AssertionError(f"deadlock: no device can run its next task: {heads}")


def _can_run(task: Task, done: set[tuple[str, int, int]]) -> bool:
    microbatch = task.microbatches.start
    if task.takes_gradients:
        return ("gradient", task.layers.stop, microbatch) in done
    return task.layers.start == 0 or ("input", task.layers.start, microbatch) in done


def _marks(task: Task) -> set[tuple[str, int, int]]:
    """Return a task's products as marks: the input of the next layer, or the gradient for the layer below."""
    microbatch = task.microbatches.start
    if task.sends_outputs:
        return {("input", task.layers.stop, microbatch)}
    return {("gradient", task.layers.start, microbatch)}


CLASSIC: Mapping[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "looped-bfs": looped_bfs,
}
"""The schedules by name."""
