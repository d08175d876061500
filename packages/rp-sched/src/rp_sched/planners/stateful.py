"""Tasks of calls whose state stays on devices from call to call: where their layers run, and in which stages."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from rp_sched.problem.task_kinds import TaskKind
from rp_sched.problem.tasks import Task

# Weights up to this share of some devices' memory stay there: the rest is for state, such as keys and values.
_SHARE = 0.6
# Of a device's memory, for the layers that it has at its turn: as many as a task brings while others stay.
_TURN_SHARE = 1 / 32


def assign_layers(sizes: Sequence[int], memory: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each device. `sizes`: bytes of each layer's weights. `memory`: bytes of each device.

    Where all weights have room on some devices, those layers that follow each other are on as few devices as that
    takes. Otherwise each device brings what does not fit of its own layers alone, and a few layers go to each in
    turn: so all devices bring weights at the same time, and each computes another microbatch. If devices divided
    the microbatches, each would keep the same weights, and bring the same others.

    >>> assign_layers([1, 4, 2, 2], [20, 20]), assign_layers([1, 4, 2, 2], [8, 8])
    (((0, 1, 2, 3), ()), ((0, 1), (2, 3)))
    """
    fitting = (count for count, room in enumerate(accumulate(memory), start=1) if sum(sizes) <= _SHARE * room)
    for count in fitting:
        return _divided(sizes, memory[:count], len(memory))
    return _in_turn(sizes, _TURN_SHARE * min(memory), len(memory))


def _in_turn(sizes: Sequence[int], most: float, count: int) -> tuple[tuple[int, ...], ...]:
    """Layers that follow each other and take `most` bytes, or single layers, to `count` devices in turn.

    >>> _in_turn([1, 4, 2, 2, 4], 4, 2)
    ((0, 2, 3), (1, 4))
    """
    turns = stages_within(most, dict(enumerate(sizes)))
    return tuple(tuple(layer for turn in turns[first::count] for layer in turn) for first in range(count))


def _divided(sizes: Sequence[int], shares: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Layers that follow each other, whose sizes are about as `shares`, and none, for `count` devices in all.

    >>> _divided([1, 4, 4, 4, 3], [10, 10], 3)
    ((0, 1, 2), (3, 4), ())
    """
    ends = [share * sum(sizes) / sum(shares) for share in accumulate(shares)]
    before = accumulate(sizes, initial=0)
    # By its middle. Layers without weights at the end belong to the last one.
    homes = [
        min(bisect_right(ends, start + size / 2), len(shares) - 1)
        for start, size in zip(before, sizes, strict=False)
    ]
    return tuple(tuple(layer for layer, home in enumerate(homes) if home == device) for device in range(count))


def stages_within(most: float, sizes: Mapping[int, int]) -> list[range]:
    """Return layers that follow each other, whose sizes add up to `most` or less, or are a single layer.

    `sizes`: of each layer, by its number, in ascending order.

    >>> stages_within(5, {3: 2, 4: 3, 5: 1, 6: 9, 8: 1})
    [range(3, 5), range(5, 6), range(6, 7), range(8, 9)]
    >>> stages_within(5, {})
    []
    """
    stages: list[range] = []
    nbytes = 0
    for layer, size in sizes.items():
        if stages and layer == stages[-1].stop and nbytes + size <= most:
            stages[-1] = range(stages[-1].start, layer + 1)
            nbytes += size
        else:
            stages.append(range(layer, layer + 1))
            nbytes = size
    return stages


def stateful_tasks(stages: Sequence[Sequence[range]], microbatches: int) -> tuple[Task, ...]:
    """Return the tasks of a call, each with all microbatches. `stages`: of each device.

    >>> stateful_tasks([[range(0, 2)], [range(2, 3)]], 4)
    (F[0:2] m0:4 @0, F[2:3] m0:4 @1)
    """
    tasks = [
        Task(TaskKind.FORWARD, stage, range(microbatches), device)
        for device, own in enumerate(stages)
        for stage in own
    ]
    return tuple(sorted(tasks, key=lambda task: task.layers.start))
