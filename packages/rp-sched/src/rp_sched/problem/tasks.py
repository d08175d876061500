"""`Task`, the task list of a plan, and the check that a task list can run."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rp_sched.errors import InvalidOrder, InvalidPlan, InvalidTask
from rp_sched.problem import bounds, spans
from rp_sched.problem.checks import at_most, shown, whole
from rp_sched.problem.modes import Mode, check_mode
from rp_sched.problem.plan import Phase, Plan
from rp_sched.problem.task_kinds import TaskKind

_NUMBER = "([0-9]{1,18})"
_WRITTEN = re.compile(rf"({'|'.join(TaskKind)})\[{_NUMBER}:{_NUMBER}\] m{_NUMBER}:{_NUMBER} @{_NUMBER}")


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Task:
    """One unit of work: contiguous layers, run for contiguous microbatches, on one device.

    >>> task = Task("F", range(0, 7), range(0, 4), 2)
    >>> task
    F[0:7] m0:4 @2
    >>> Task.parse(repr(task)) == task
    True
    >>> task.runs_forward, task.adds_gradients
    (True, False)

    `kind` may be given as its letters. Raises `InvalidTask` for an invalid kind, range or device.
    """

    kind: TaskKind
    layers: range
    microbatches: range
    device: int

    def __init__(self, kind: str, layers: range, microbatches: range, device: int) -> None:
        # A frozen dataclass can set its fields only through object.__setattr__.
        put = object.__setattr__
        put(self, "kind", kind if type(kind) is TaskKind else _kind(kind))
        put(self, "layers", layers)
        put(self, "microbatches", microbatches)
        put(self, "device", device)
        spans.check("layers", layers, error=InvalidTask)
        spans.check("microbatches", microbatches, error=InvalidTask)
        whole("device", device, error=InvalidTask)

    def __repr__(self) -> str:
        return f"{self.kind}[{spans.text(self.layers)}] m{spans.text(self.microbatches)} @{self.device}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Parse the `repr` of a task.

        >>> Task.parse("FB[7:9] m2:4 @0").layers
        range(7, 9)
        """
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise InvalidTask(f"a task must be written like 'F[0:7] m0:4 @2', but the text is {shown(text)}")
        first, last, first_batch, last_batch, device = map(int, match.groups()[1:])
        return cls(match[1], range(first, last), range(first_batch, last_batch), device)

    @property
    def runs_forward(self) -> bool:
        """See `TaskKind.runs_forward`."""
        return self.kind.runs_forward

    @property
    def recomputes(self) -> bool:
        """See `TaskKind.recomputes`."""
        return self.kind.recomputes

    @property
    def runs_backward(self) -> bool:
        """See `TaskKind.runs_backward`."""
        return self.kind.runs_backward

    @property
    def computes_loss(self) -> bool:
        """See `TaskKind.computes_loss`."""
        return self.kind.computes_loss

    @property
    def saves_inputs(self) -> bool:
        """See `TaskKind.saves_inputs`."""
        return self.kind.saves_inputs

    @property
    def keeps_activations(self) -> bool:
        """See `TaskKind.keeps_activations`."""
        return self.kind.keeps_activations

    @property
    def adds_gradients(self) -> bool:
        """See `TaskKind.adds_gradients`."""
        return self.kind.adds_gradients

    @property
    def sends_outputs(self) -> bool:
        """See `TaskKind.sends_outputs`."""
        return self.kind.sends_outputs

    @property
    def takes_gradients(self) -> bool:
        """See `TaskKind.takes_gradients`."""
        return self.kind.takes_gradients

    @property
    def sends_gradients(self) -> bool:
        """See `TaskKind.sends_gradients`."""
        return self.kind.sends_gradients


def _kind(letters: object) -> TaskKind:
    try:
        return TaskKind(letters)
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in TaskKind)
        raise InvalidTask(f"kind must be one of {known}, but is {shown(letters)} instead") from None


def phases(plan: Plan, microbatches: int) -> Iterator[Phase]:
    """Yield the phases of a plan; a phase whose microbatches are not divided has one group of all."""
    undivided = (range(microbatches),)
    for kind, stages, groups in plan.phases():
        yield kind, stages, groups or undivided


def check_tasks(plan: Plan, microbatches: int) -> None:
    """Raise `InvalidPlan` for a plan with more tasks per call than `bounds.TASKS`."""
    count = sum(len(stages) * len(groups) for _, stages, groups in phases(plan, microbatches))
    at_most("the number of tasks", count, bounds.TASKS, error=InvalidPlan)


def _steps(plan: Plan, microbatches: int) -> Iterator[tuple[TaskKind, range, range]]:
    for kind, stages, groups in phases(plan, microbatches):
        for layers in stages:
            for batch in groups:
                yield kind, layers, batch


def order(plan: Plan, *, mode: Mode, devices: int, microbatches: int, first_device: int = 0) -> tuple[Task, ...]:
    """Return the tasks of one call under `plan`, in launch order, assigned to the devices in turn.

    >>> plan = Plan((range(0, 3),), range(3, 5), (range(0, 3),))
    >>> order(plan, mode="fused", devices=2, microbatches=4)
    (F[0:3] m0:4 @0, FB[3:5] m0:4 @1, B[0:3] m0:4 @0)

    Each task follows the tasks that it depends on. `first_device` gets the first task; to continue the turns from
    call to call, give the device after that of the last call's last task. A plan that uses fewer devices uses the
    first ones. For a plan that is not `in_turn` this assignment is correct, but that of a `Assigner` is faster.

    Raises `InvalidPlan` for a plan that does not suit the mode or the microbatches.
    """
    plan.check(max(plan.num_layers, 1), mode)
    plan.check_microbatches(microbatches)
    _check_devices(devices, first_device)
    check_tasks(plan, microbatches)
    used = min(devices, plan.devices or devices)
    return tuple(
        Task(kind, layers, batch, (first_device + turn) % used)
        for turn, (kind, layers, batch) in enumerate(_steps(plan, microbatches))
    )


def without_backward_below(lowest: int, tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return tasks whose backward ends at layer `lowest`: those below need no recomputation and no weights then.

    >>> without_backward_below(2, map(Task.parse, ["F[0:3] m0:4 @0", "B[1:3] m0:4 @1", "B[0:1] m0:4 @0"]))
    (F[0:3] m0:4 @0, B[2:3] m0:4 @1)
    """
    return tuple(_from(lowest, task) for task in tasks if not task.recomputes or task.layers.stop > lowest)


def _from(lowest: int, task: Task) -> Task:
    start, stop = task.layers.start, task.layers.stop
    return replace(task, layers=range(lowest, stop)) if task.recomputes and start < lowest else task


def check_order(
    tasks: Iterable[Task], num_layers: int, microbatches: int, mode: Mode, *, devices: int | None = None
) -> None:
    """Raise `InvalidOrder` for a task list that one call cannot run in this order.

    >>> tasks = [Task.parse("FB[0:3] m0:1 @0"), Task.parse("FB[0:3] m1:2 @1")]
    >>> check_order(tasks, num_layers=3, microbatches=2, mode="fused")
    >>> check_order(tasks[1:], num_layers=3, microbatches=2, mode="fused")
    Traceback (most recent call last):
    rp_sched.errors.InvalidOrder: the list ends, but layer 0 never runs forward for microbatch 0; add a task for it

    Each layer must run forward once per microbatch, from the first layer to the last, and, unless `mode` is
    `infer`, backward once, from the last layer to the first. In mode `fused` each microbatch's last layers must
    run in a task of kind `FB`. In mode `train` all forward tasks must precede the backward tasks. Stages may
    differ between microbatches. If `devices` is given, task devices must be below it.
    """
    whole("num_layers", num_layers, least=1)
    whole("microbatches", microbatches, least=1, bound=bounds.MICROBATCHES)
    check_mode(mode)
    progress = _Progress(num_layers, microbatches, mode)
    for index, task in enumerate(tasks):
        where = f"task {index}, {task!r}"
        _check_task(where, task, devices)
        progress.run(where, task)
    progress.finish()


def _check_devices(devices: int, first_device: int) -> None:
    whole("devices", devices, least=1, bound=bounds.DEVICES)
    if whole("first_device", first_device) >= devices:
        raise ValueError(f"first_device must be below devices ({devices}), but is {first_device} instead")


def _check_task(where: str, task: object, devices: int | None) -> None:
    if not isinstance(task, Task):
        raise TypeError(f"{where}: must be a Task, but is a {type(task).__name__}")
    if devices is not None and task.device >= devices:
        raise InvalidOrder(f"{where}: there are {devices} devices; use one below {devices}")


class _Progress:
    """The progress of each microbatch through the layers, for `check_order`.

    `_up[m]`: layers below it have run forward. `_down[m]`: layers from it on have run backward.
    """

    def __init__(self, num_layers: int, microbatches: int, mode: Mode) -> None:
        self._num_layers = num_layers
        self._mode: Mode = mode
        self._up = [0] * microbatches
        self._down = [num_layers] * microbatches
        self._backward_begun = False

    def run(self, where: str, task: Task) -> None:
        self._check_reach(where, task)
        self._check_mode(where, task)
        for microbatch in task.microbatches:
            if task.runs_forward:
                self._forward(where, task.layers, microbatch)
            if task.runs_backward:
                self._backward(where, task.layers, microbatch)

    def finish(self) -> None:
        for microbatch, layer in enumerate(self._up):
            if layer < self._num_layers:
                raise _never(layer, microbatch, "forward")
        for microbatch, layer in enumerate(self._down):
            if layer > 0 and self._mode != "infer":
                raise _never(layer - 1, microbatch, "backward")

    def _check_reach(self, where: str, task: Task) -> None:
        if task.layers.stop > self._num_layers:
            raise InvalidOrder(f"{where}: the model has {self._num_layers} layers; end at {self._num_layers}")
        if task.microbatches.stop > len(self._up):
            raise InvalidOrder(f"{where}: there are {len(self._up)} microbatches; end at {len(self._up)}")

    def _check_mode(self, where: str, task: Task) -> None:
        is_tail = task.layers.stop == self._num_layers
        if self._mode not in task.kind.modes:
            raise InvalidOrder(f"{where}: mode {self._mode!r} has no tasks of kind {task.kind}")
        if task.computes_loss and not is_tail:
            raise InvalidOrder(f"{where}: a fused task must end with the last layer, at {self._num_layers}")
        if task.runs_forward and not task.computes_loss and is_tail and self._mode == "fused":
            raise InvalidOrder(f"{where}: in mode 'fused' the last layer's task must be of kind {TaskKind.FUSED}")
        self._backward_begun |= task.runs_backward
        if task.runs_forward and self._backward_begun and self._mode == "train":
            raise InvalidOrder(f"{where}: in mode 'train' every forward task comes before the first backward one")

    def _forward(self, where: str, layers: range, microbatch: int) -> None:
        reached = self._up[microbatch]
        if reached > layers.start:
            raise _twice(where, layers.start, microbatch, "forward")
        if reached < layers.start:
            raise _too_early(where, reached, microbatch, "forward")
        self._up[microbatch] = layers.stop

    def _backward(self, where: str, layers: range, microbatch: int) -> None:
        above, reached = self._up[microbatch], self._down[microbatch]
        if above < self._num_layers:
            raise _too_early(where, above, microbatch, "forward")
        if reached < layers.stop:
            raise _twice(where, layers.stop - 1, microbatch, "backward")
        if reached > layers.stop:
            raise _too_early(where, reached - 1, microbatch, "backward")
        self._down[microbatch] = layers.start


def _twice(where: str, layer: int, microbatch: int, direction: str) -> InvalidOrder:
    return InvalidOrder(
        f"{where}: layer {layer} has run {direction} for microbatch {microbatch} before; remove it here"
    )


def _too_early(where: str, layer: int, microbatch: int, direction: str) -> InvalidOrder:
    return InvalidOrder(
        f"{where}: layer {layer} has not run {direction} for microbatch {microbatch} yet; put its task first"
    )


def _never(layer: int, microbatch: int, direction: str) -> InvalidOrder:
    return InvalidOrder(
        f"the list ends, but layer {layer} never runs {direction} for microbatch {microbatch}; add a task for it"
    )
