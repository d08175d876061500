"""Costs of stages: compute time, transfer times and memory."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from rp_sched.errors import Infeasible
from rp_sched.problem.costs import LayerCost, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.task_kinds import TaskKind

_Number = TypeVar("_Number", int, float)


class Load(NamedTuple):
    """The time and memory of one stage on a device.

    `ms`: compute time of one microbatch. `hop_ms`: from the end of a microbatch to when the next stage may start
    it. `results_after_ms`: from the end of the task to when the caller has the results that it waits for; negative
    for losses, which precede the backward pass; minus infinity if there are none. `weights_ms`: upload of the
    weights. `inputs_ms`, `outputs_ms`: upload and download per microbatch. `gradients_ms`: download of the
    gradients, once per task. `state_bytes`: weights and gradients. `gradient_bytes`: gradients alone.
    `kept_bytes`: kept activations of one microbatch.
    """

    ms: float
    hop_ms: float
    results_after_ms: float
    weights_ms: float
    inputs_ms: float
    outputs_ms: float
    gradients_ms: float
    state_bytes: int
    gradient_bytes: int
    kept_bytes: int


class Job(NamedTuple):
    """A task without a device. `gate`: it starts only when the caller has the outputs of all microbatches."""

    kind: TaskKind
    layers: range
    microbatches: range
    gate: bool
    load: Load


# A job for the innermost loop: gate, first and last microbatch (exclusive), ms, hop_ms, results_after_ms.
Brief = tuple[bool, int, int, float, float, float]


class Piece(NamedTuple):
    """The jobs of one stage, in full and in brief."""

    jobs: tuple[Job, ...]
    brief: tuple[Brief, ...]


class Loads:
    """The loads of any stage of one model, computed from prefix sums.

    >>> loads = Loads([LayerCost(1.0, 2.0, weight_bytes=5), LayerCost(3.0, 6.0)], Limits(hop_ms=0.5))
    >>> loads.of(TaskKind.FORWARD, range(0, 2)).ms, loads.of(TaskKind.BACKWARD, range(1, 2)).ms
    (4.0, 9.0)
    >>> loads.of(TaskKind.FUSED, range(0, 2)).results_after_ms
    -8.0
    """

    def __init__(self, costs: Sequence[LayerCost], limits: Limits) -> None:
        self.costs = tuple(costs)
        self.limits = limits
        self.forward_ms = _sums([cost.forward_ms for cost in costs])
        self.backward_ms = _sums([cost.backward_ms for cost in costs])
        self.weight_bytes = _sums([cost.weight_bytes for cost in costs])
        self.trainable_bytes = _sums([cost.trainable_bytes for cost in costs])
        self.gradient_bytes = _sums([cost.gradient_bytes for cost in costs])
        self.kept_bytes = _sums([cost.kept_bytes for cost in costs])
        self.ordered = _sums([int(cost.writes_buffers) for cost in costs])
        # The input of each layer. That of the model counts as 0, since its size is not given.
        self.input_bytes = [0, *(cost.boundary_bytes for cost in costs)]
        links = (limits.upload_gb_s, limits.download_gb_s)
        self.linked = any(speed is not None for speed in links)
        self._pieces: dict[object, Piece] = {}

    @property
    def num_layers(self) -> int:
        return len(self.costs)

    def may_divide(self, layers: range) -> bool:
        """Whether different devices may run different microbatches of these layers."""
        return self.ordered[layers.stop] == self.ordered[layers.start]

    def of(self, kind: TaskKind, layers: range, saved: Sequence[int] = ()) -> Load:
        """The load of a stage. `saved`: the layers whose inputs the backward pass reads from host memory."""
        start, stop = layers.start, layers.stop
        up, down = self.limits.upload_ms_per_byte, self.limits.download_ms_per_byte
        forward_ms, inputs = 0.0, 0
        if kind.runs_forward or kind.recomputes:
            forward_ms, inputs = self.forward_ms[stop] - self.forward_ms[start], self.input_bytes[start]
        backward_ms = self.backward_ms[stop] - self.backward_ms[start] if kind.runs_backward else 0.0
        weights = self.weight_bytes[stop] - self.weight_bytes[start]
        gradients = self.gradient_bytes[stop] - self.gradient_bytes[start] if kind.adds_gradients else 0
        leaving = self.trainable_bytes[stop] - self.trainable_bytes[start] if kind.adds_gradients else 0
        above = self.input_bytes[stop] if kind.takes_gradients else 0
        below = self.input_bytes[start] if kind.sends_gradients else 0
        handed = below + (self.input_bytes[stop] if kind.sends_outputs else 0)
        kept_on_host = (
            sum(self.input_bytes[layer] for layer in saved if start < layer < stop) if kind.saves_inputs else 0
        )
        hop_ms = self.limits.hop_ms + handed * (up + down)
        return Load(
            ms=forward_ms + backward_ms,
            hop_ms=hop_ms,
            results_after_ms=_results_after_ms(kind, hop_ms, backward_ms),
            weights_ms=weights * up,
            inputs_ms=(inputs + above) * up,
            outputs_ms=(handed + kept_on_host) * down,
            gradients_ms=leaving * down,
            state_bytes=weights + gradients,
            gradient_bytes=gradients,
            kept_bytes=self.kept_bytes[stop] - self.kept_bytes[start] if kind.keeps_activations else 0,
        )

    def piece(
        self, kind: TaskKind, layers: range, groups: tuple[range, ...], saved: Sequence[int], gate: bool
    ) -> Piece:
        """The jobs of a stage; cached, since planners try many plans with the same stages."""
        inside = tuple(layer for layer in saved if layer in layers) if self.linked and kind.saves_inputs else ()
        key = (kind, layers, groups, inside, gate)
        if key not in self._pieces:
            load = self.of(kind, layers, inside)
            jobs = tuple(Job(kind, layers, batch, gate and batch is groups[0], load) for batch in groups)
            self._pieces[key] = Piece(jobs, tuple(map(_brief, jobs)))
        return self._pieces[key]

    def fits(self, kind: TaskKind, layers: range) -> bool:
        """Whether a device has memory for these layers as one stage while it fetches the next one.

        A stage of a single layer needs no memory for the next stage, which then waits. If a stage is the whole
        model, the next one is the same model in the next call.
        """
        load = self.of(kind, layers)
        device, stage = self.limits.device_memory_bytes, self.limits.stage_limit_bytes
        weights = load.state_bytes - load.gradient_bytes
        if len(layers) == 1:
            return device is None or load.state_bytes + load.kept_bytes <= device
        if kind.runs_forward and kind.runs_backward and len(layers) == self.num_layers:
            stage, ahead = self.limits.stage_bytes, weights
        else:
            ahead = self.limits.room_ahead_bytes
        within = stage is None or load.state_bytes <= stage
        if not kind.may_exceed_room_ahead and self.limits.ahead_bytes is not None:
            within = within and weights <= self.limits.ahead_bytes
        return within and (device is None or load.state_bytes + load.kept_bytes + ahead <= device)

    def check_feasible(self, mode: Mode) -> None:
        """Raise `Infeasible` if a single layer is too large for a device."""
        device = self.limits.device_memory_bytes
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
        adding = [(stages, groups) for kind, stages, groups in plan.phases() if kind.adds_gradients]
        copies = 2 if any(len(groups) > 1 for _, groups in adding) else 1
        gradients = self.trainable_bytes[-1] * copies if any(stages for stages, _ in adding) else 0
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

    Gradients take as many bytes as the trainable weights, or twice as many if several tasks add to them, since
    those sums are fp32. Activations are counted for all microbatches of two calls: the inputs of all fused and
    backward stages, and one more in transit.
    """
    return Loads(costs, Limits()).host_bytes(plan, microbatches)


def saved_layers(plan: Plan) -> list[int]:
    """The layers whose inputs the forward pass saves on the host for the backward pass."""
    return [stage.start for kind, stages, _ in plan.phases() if kind.runs_backward for stage in stages]


def _results_after_ms(kind: TaskKind, hop_ms: float, backward_ms: float) -> float:
    if kind.sends_outputs:
        return hop_ms
    return -backward_ms if kind.computes_loss else -math.inf


def _brief(job: Job) -> Brief:
    batch, load = job.microbatches, job.load
    return job.gate, batch.start, batch.stop, load.ms, load.hop_ms, load.results_after_ms


def _sums(values: Sequence[_Number]) -> list[_Number]:
    return list(accumulate(values, initial=type(values[0])(0)))
