"""Costs of stages: compute time, transfer times and memory."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from rp_sched.errors import Infeasible
from rp_sched.problem.costs import GRADIENT_PER_TRAINABLE, LayerCost
from rp_sched.problem.limits import Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import TaskKind
from rp_sched.simulation.resources import Resources, TaskWork, total

# Bytes of a weight, and of a gradient that nothing is added to.
WEIGHT_BYTES = 2
_Number = TypeVar("_Number", int, float)


class Load(NamedTuple):
    """The time, traffic and memory of one stage.

    `ms`: compute time of one microbatch; `backward_ms`: the part of it that needs gradients. `launch_ms`: how
    long its launching holds the GIL. `hop_ms`: from the end of a microbatch to when the next stage may start it,
    on the slowest links. `weight_bytes`: uploaded for the task, of which `disk_bytes` are read from disk.
    `input_bytes`, `output_bytes`: uploaded and downloaded per microbatch. `sent_bytes`, `added_bytes`: gradients
    downloaded by the task, of which the latter are added on the host. `step_bytes`: traffic of the optimizer's
    step that the task's gradients complete. `state_bytes`: weights and gradients on the device. `gradient_bytes`:
    gradients alone. `kept_bytes`: kept activations of one microbatch, and what graphs take.
    """

    kind: TaskKind
    ms: float
    backward_ms: float
    launch_ms: float
    hop_ms: float
    weight_bytes: int
    input_bytes: int
    output_bytes: int
    sent_bytes: int
    added_bytes: int
    step_bytes: float
    state_bytes: int
    gradient_bytes: int
    kept_bytes: int
    disk_bytes: int

    @property
    def step_ms(self) -> float:
        """The time of one microbatch alone: the device computes while it is launched to."""
        return self.step_on(1.0)

    def step_on(self, slowdown: float) -> float:
        """The time of one microbatch alone on a device that is slower by this factor; the mean of the task's."""
        return max(self.ms * slowdown, self.launch_ms)

    def results_after_ms(self, step_ms: float) -> float:
        """From the end of the task, of microbatches of `step_ms`, to when the caller has what it waits for.

        Negative for losses, which precede the backward pass; minus infinity if there are none.
        """
        if self.kind.sends_outputs:
            return self.hop_ms
        if not self.kind.computes_loss:
            return -math.inf
        return -self.backward_ms if step_ms == self.ms else -self.backward_part * step_ms

    @property
    def backward_part(self) -> float:
        """The part of a microbatch's time that needs gradients."""
        return self.backward_ms / self.ms if self.ms else 0.0


class Sums(NamedTuple):
    """How the gradients of a stage join those of other tasks of a call.

    `tasks`: how many tasks add to them. `nth`: how many do before this one.
    """

    tasks: int = 1
    nth: int = 0


ALONE = Sums()


class UnassignedTask(NamedTuple):
    """A task without a device. `gate`: it starts only when the caller has the outputs of all microbatches."""

    kind: TaskKind
    layers: range
    microbatches: range
    gate: bool
    load: Load


# A job for the innermost loop: gate, first and last microbatch (exclusive), ms, hop_ms, results_after_ms.
Brief = tuple[bool, int, int, float, float, float]


class StageJobs(NamedTuple):
    """The jobs of one stage, in full, in brief, and what they take in all."""

    jobs: tuple[UnassignedTask, ...]
    brief: tuple[Brief, ...]
    work: TaskWork


class Loads:
    """The loads of any stage of one model, computed from prefix sums.

    >>> loads = Loads([LayerCost(1.0, 2.0, weight_bytes=5), LayerCost(3.0, 6.0)], Limits(hop_ms=0.5))
    >>> loads.of(TaskKind.FORWARD, range(0, 2)).ms, loads.of(TaskKind.BACKWARD, range(1, 2)).ms
    (4.0, 9.0)
    >>> loads.of(TaskKind.FUSED, range(0, 2)).results_after_ms(12.0)
    -8.0
    """

    def __init__(self, costs: Sequence[LayerCost], limits: Limits) -> None:
        self.costs = tuple(costs)
        self.limits = limits
        self.forward_ms = _sums([cost.forward_ms for cost in costs])
        self.backward_ms = _sums([cost.backward_ms for cost in costs])
        self.weight_bytes = _sums([cost.weight_bytes for cost in costs])
        self.disk_bytes = _sums([cost.disk_bytes for cost in costs])
        self.trainable_bytes = _sums([cost.trainable_bytes for cost in costs])
        self.gradient_bytes = _sums([cost.gradient_bytes for cost in costs])
        self.kept_bytes = _sums([cost.kept_bytes + cost.graph_bytes for cost in costs])
        self.ordered = _sums([int(cost.writes_buffers) for cost in costs])
        # The input of each layer. That of the model counts as 0, since its size is not given.
        self.input_bytes = [0, *(cost.boundary_bytes for cost in costs)]
        self._launch_sums = {kind: _sums([cost.launch_ms(kind) for cost in costs]) for kind in TaskKind}
        by_python = (cost.python_launch_ms(kind) for cost in costs for kind in TaskKind)
        self.shares_nothing = not any(by_python) and limits.shares_nothing
        # Devices are alike and only they take time: nothing but the stages' times has to be simulated.
        self.plain = limits.only_devices_take_time
        self._hop_ms_per_byte = limits.upload_ms_per_byte + limits.download_ms_per_byte
        # Looked up once, since planners ask thousands of times.
        self._memory_bytes = limits.smallest_memory_bytes
        self._stage_limit_bytes = limits.stage_limit_bytes
        self._room_ahead_bytes = limits.room_ahead_bytes
        self._resources: dict[int, Resources] = {}
        self._pieces: dict[object, StageJobs] = {}

    @property
    def num_layers(self) -> int:
        return len(self.costs)

    def resources(self, devices: int) -> Resources:
        """What the first `devices` devices have and share."""
        if devices not in self._resources:
            self._resources[devices] = Resources(self.limits, devices)
        return self._resources[devices]

    def may_divide(self, layers: range) -> bool:
        """Whether different devices may run different microbatches of these layers."""
        return self.ordered[layers.stop] == self.ordered[layers.start]

    def of(
        self,
        kind: TaskKind,
        layers: range,
        saved: Sequence[int] = (),
        sums: Sums = ALONE,
    ) -> Load:
        """The load of a stage. `saved`: the layers whose inputs the backward pass reads from host memory."""
        start, stop = layers.start, layers.stop
        forward_ms, inputs = 0.0, 0
        if kind.runs_forward or kind.recomputes:
            forward_ms, inputs = self.forward_ms[stop] - self.forward_ms[start], self.input_bytes[start]
        backward_ms = self.backward_ms[stop] - self.backward_ms[start] if kind.runs_backward else 0.0
        weights = self.weight_bytes[stop] - self.weight_bytes[start]
        gradients = self.gradient_bytes[stop] - self.gradient_bytes[start] if kind.adds_gradients else 0
        above = self.input_bytes[stop] if kind.takes_gradients else 0
        below = self.input_bytes[start] if kind.sends_gradients else 0
        handed = below + (self.input_bytes[stop] if kind.sends_outputs else 0)
        kept_on_host = (
            sum(self.input_bytes[layer] for layer in saved if start < layer < stop) if kind.saves_inputs else 0
        )
        sent, added, stepped = self.leaving(layers, sums) if kind.adds_gradients else (0, 0, 0.0)
        return Load(
            kind=kind,
            ms=forward_ms + backward_ms,
            backward_ms=backward_ms,
            launch_ms=self._launch_ms(kind, layers),
            hop_ms=self.limits.hop_ms + handed * self._hop_ms_per_byte,
            weight_bytes=weights,
            input_bytes=inputs + above,
            output_bytes=handed + kept_on_host,
            sent_bytes=sent,
            added_bytes=added,
            step_bytes=stepped,
            state_bytes=weights + gradients,
            gradient_bytes=gradients,
            kept_bytes=self.kept_bytes[stop] - self.kept_bytes[start] if kind.keeps_activations else 0,
            disk_bytes=self.disk_bytes[stop] - self.disk_bytes[start],
        )

    def _launch_ms(self, kind: TaskKind, layers: range) -> float:
        last, sums = self.costs[layers.stop - 1], self._launch_sums[kind]
        # The loss function reads what the last layer returns: Python launches both.
        own = max(last.python_launch_ms(kind) - last.launch_ms(kind), 0.0) if kind.computes_loss else 0.0
        return sums[layers.stop] - sums[layers.start] + own

    def least_launch_ms(self, recomputed: int | None) -> float:
        """The least for which launching a microbatch through the row may hold the GIL.

        `recomputed`: how many of the first layers are recomputed before the backward pass; None: there is none.
        """
        kinds = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.FUSED
        forward, backward, fused = (self._launch_sums[kind] for kind in kinds)
        if recomputed is None:
            return forward[-1]
        return forward[recomputed] + backward[recomputed] + fused[-1] - fused[recomputed]

    def leaving(self, layers: range, sums: Sums) -> tuple[int, int, float]:
        """Bytes that a task sends, those of them that are added, and bytes of the step if it is the last task."""
        host = self.limits.host
        trainable = self.trainable_bytes[layers.stop] - self.trainable_bytes[layers.start]
        sent = trainable * (GRADIENT_PER_TRAINABLE if host.widens(sums.tasks) else 1)
        added = sent if host.adds(sums.nth) else 0
        if sums.nth < sums.tasks - 1:
            return sent, added, 0.0
        # What the optimizer reads beyond one 16-bit gradient.
        more = (host.gradient_copies(sums.tasks) - 1) * trainable if host.gradient_buffers is not None else 0
        return sent, added, trainable / WEIGHT_BYTES * host.step_bytes + more

    def piece(
        self, kind: TaskKind, layers: range, groups: tuple[range, ...], saved: Sequence[int], gate: bool
    ) -> StageJobs:
        """The jobs of a stage; cached, since planners try many plans with the same stages."""
        inside = tuple(layer for layer in saved if layer in layers) if not self.plain and kind.saves_inputs else ()
        key = (kind, layers, groups, inside, gate)
        if key not in self._pieces:
            loads = self._group_loads(kind, layers, inside, groups)
            jobs = tuple(
                UnassignedTask(kind, layers, batch, gate and batch is groups[0], load)
                for batch, load in zip(groups, loads, strict=True)
            )
            self._pieces[key] = StageJobs(jobs, tuple(map(_brief, jobs)), total(map(_work, jobs)))
        return self._pieces[key]

    def _group_loads(
        self, kind: TaskKind, layers: range, saved: Sequence[int], groups: Sequence[range]
    ) -> list[Load]:
        """The load of each group's task: first those that fill a buffer, then those that add to it."""
        count = len(groups)
        nths = [0] * count
        if kind.adds_gradients and count > 1:
            filling = min(count - 1, self.limits.host.gradient_buffers or count)
            nths = [*[0] * filling, *[count - 2] * (count - 1 - filling), count - 1]
        known = {nth: self.of(kind, layers, saved, Sums(count, nth)) for nth in set(nths)}
        return [known[nth] for nth in nths]

    def fits(self, kind: TaskKind, layers: range) -> bool:
        """Whether a device has memory for these layers as one stage while it fetches the next one.

        A stage of a single layer needs no memory for the next stage, which then waits. If a stage is the whole
        model, the next one is the same model in the next call.
        """
        load = self.of(kind, layers)
        device, stage = self._memory_bytes, self._stage_limit_bytes
        weights = load.state_bytes - load.gradient_bytes
        if len(layers) == 1:
            return device is None or load.state_bytes + load.kept_bytes <= device
        if kind.runs_forward and kind.runs_backward and len(layers) == self.num_layers:
            stage, ahead = self.limits.stage_bytes, weights
        else:
            ahead = self._room_ahead_bytes
        within = stage is None or load.state_bytes <= stage
        if not kind.may_exceed_room_ahead and self.limits.ahead_bytes is not None:
            within = within and weights <= self.limits.ahead_bytes
        return within and (device is None or load.state_bytes + load.kept_bytes + ahead <= device)

    def check_feasible(self, mode: Mode) -> None:
        """Raise `Infeasible` if a single layer is too large for a device."""
        device = self.limits.smallest_memory_bytes
        if device is None:
            return
        kinds = [kind for kind in TaskKind if mode in kind.modes]
        for layer in range(self.num_layers):
            loads = [self.of(kind, range(layer, layer + 1)) for kind in kinds]
            most = max(load.state_bytes + load.kept_bytes for load in loads)
            if most > device:
                raise Infeasible(layer, most, device)

    def host_bytes(self, plan: Plan, microbatches: int) -> int:
        """An upper bound on host memory under a plan; see `host_bytes`."""
        phases = [phase for phase in plan.phases() if phase[0].adds_gradients and phase[1]]
        most = max((len(groups) for _, _, groups in phases), default=0) or 1
        copies = 1 if self.limits.host.double_buffer else 0
        copies += self.limits.host.gradient_copies(most) if phases else 0
        gradients = self.trainable_bytes[-1] * copies
        saved = sum(self.input_bytes[layer] for layer in saved_layers(plan))
        # Besides its saved inputs, a microbatch has one activation or gradient in transit between stages. Two
        # calls may overlap, so count both.
        return self.weight_bytes[-1] + gradients + 2 * microbatches * (saved + max(self.input_bytes))

    def fits_host(self, plan: Plan, microbatches: int) -> bool:
        """Whether host memory suffices for a plan."""
        host = self.limits.host_memory_bytes
        return host is None or self.host_bytes(plan, microbatches) <= host


def host_bytes(plan: Plan, costs: Sequence[LayerCost], *, microbatches: int) -> int:
    """The host memory that a plan needs: weights, gradients and activations, without optimizer state.

    >>> layer = LayerCost(1.0, weight_bytes=100, boundary_bytes=7)
    >>> host_bytes(Plan((range(0, 1),), range(1, 2), (range(0, 1),)), [layer] * 2, microbatches=3)
    484

    Gradients take as many bytes as the trainable weights, or twice as many if several tasks add to them: two
    16-bit blocks, or fp32 sums. Activations are counted for all microbatches of two calls: the inputs of all
    fused and backward stages, and one more in transit.
    """
    return Loads(costs, Limits()).host_bytes(plan, microbatches)


def saved_layers(plan: Plan) -> list[int]:
    """The layers whose inputs the forward pass saves on the host for the backward pass."""
    return [stage.start for kind, stages, _ in plan.phases() if kind.runs_backward for stage in stages]


def _brief(job: UnassignedTask) -> Brief:
    batch, load = job.microbatches, job.load
    step_ms = load.step_ms
    return job.gate, batch.start, batch.stop, step_ms, load.hop_ms, load.results_after_ms(step_ms)


def _work(job: UnassignedTask) -> TaskWork:
    count, load = len(job.microbatches), job.load
    return TaskWork(
        busy_ms=count * load.ms,
        launch_ms=count * load.launch_ms,
        up_bytes=load.weight_bytes + count * load.input_bytes,
        down_bytes=load.sent_bytes - load.added_bytes + count * load.output_bytes,
        added_bytes=load.added_bytes,
        step_bytes=load.step_bytes,
        disk_bytes=load.disk_bytes,
    )


def _sums(values: Sequence[_Number]) -> list[_Number]:
    return list(accumulate(values, initial=type(values[0])(0)))
