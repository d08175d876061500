"""`Plan`: the stages of a model and the division of their microbatches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, cast

from rp_sched.errors import InvalidPlan
from rp_sched.problem import bounds, spans
from rp_sched.problem.checks import shown, whole
from rp_sched.problem.modes import Mode, check_mode
from rp_sched.problem.task_kinds import TaskKind

Phase = tuple[TaskKind, tuple[range, ...], tuple[range, ...]]
"""A task kind, its stages, and the groups into which their microbatches are divided."""

_GROUPS = ("groups", "forward_groups", "backward_groups")


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The stages of a model, in the order in which they run.

    >>> plan = Plan((range(0, 3),), range(3, 5), (range(2, 3), range(0, 2)))
    >>> plan
    Plan(F[0:3] FB[3:5] B[2:3] B[0:2])
    >>> plan.check(num_layers=5, mode="fused")
    >>> Plan(fused=range(0, 5), groups=(range(0, 2), range(2, 4)))
    Plan(FB[0:5] m0:2 m2:4)

    `forward`: the forward stages, from the first layer on. `fused`: the last layers, whose forward and backward
    pass are one task. `backward`: the backward stages, from the last one to the first; they may be cut differently
    from `forward`. A stage runs all microbatches as one task on one device, unless they are divided into groups of
    microbatches, each a separate task: `groups` for the fused stage, `forward_groups` for every forward stage,
    `backward_groups` for every backward stage.

    `in_turn`: tasks go to the devices in turn; else each goes to the device that becomes free first (see
    `Assigner`). `devices`: the most devices that the plan uses; None for all.
    """

    forward: tuple[range, ...] = ()
    fused: range | None = None
    backward: tuple[range, ...] = ()
    groups: tuple[range, ...] = ()
    forward_groups: tuple[range, ...] = ()
    backward_groups: tuple[range, ...] = ()
    in_turn: bool = True
    devices: int | None = None

    def __post_init__(self) -> None:
        # Convert lists to tuples: plans are keys of caches and must be hashable.
        for name in ("forward", "backward", *_GROUPS):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            _check_ranges(name, getattr(self, name))
        if self.fused is not None:
            _check_ranges("fused", (self.fused,))
        if self.devices is not None:
            whole("devices", self.devices, least=1, bound=bounds.DEVICES)

    def __repr__(self) -> str:
        words = [word for phase in self.phases() for word in _written(*phase)]
        dealt = [] if self.in_turn else ["first free"]
        used = [] if self.devices is None else [f"{self.devices} devices"]
        return f"Plan({', '.join([' '.join(words), *dealt, *used])})"

    def encoded(self) -> dict[str, Any]:
        """Return it as JSON.

        >>> Plan.decoded(Plan(fused=range(0, 5)).encoded())
        Plan(FB[0:5])
        """
        return {one.name: _as_json(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def decoded(cls, value: object) -> "Plan":
        """Return the plan that `encoded` wrote, of JSON that others may have changed.

        Raises `ValueError`, `TypeError` or `KeyError` for anything else.
        """
        if not isinstance(value, dict):
            raise TypeError(f"a plan must be an object, but is {shown(value)} instead")
        kept = cast(dict[str, Any], value)
        if kept.keys() != {one.name for one in fields(cls)} or type(kept["in_turn"]) is not bool:
            raise ValueError("a plan has other fields, or its in_turn is neither true nor false")
        ranges = {name: tuple(map(_decoded_range, kept[name])) for name in ("forward", "backward", *_GROUPS)}
        fused = None if kept["fused"] is None else _decoded_range(kept["fused"])
        return cls(fused=fused, in_turn=kept["in_turn"], devices=kept["devices"], **ranges)

    def phases(self) -> tuple[Phase, ...]:
        """Return, for each task kind in launch order, its stages and its groups of microbatches, if any.

        >>> [(str(kind), stages) for kind, stages, _ in Plan((range(0, 3),), range(3, 5), (range(0, 3),)).phases()]
        [('F', (range(0, 3),)), ('FB', (range(3, 5),)), ('B', (range(0, 3),))]
        """
        return (
            (TaskKind.FORWARD, self.forward, self.forward_groups),
            (TaskKind.FUSED, () if self.fused is None else (self.fused,), self.groups),
            (TaskKind.BACKWARD, self.backward, self.backward_groups),
        )

    @property
    def num_layers(self) -> int:
        """The number of layers that the stages cover: one more than the last layer of any stage.

        >>> Plan((range(0, 3),), range(3, 5), (range(0, 3),)).num_layers
        5
        """
        return max((stage.stop for _, stages, _ in self.phases() for stage in stages), default=0)

    @property
    def tasks_a_stage(self) -> int:
        """The most tasks among which the microbatches of a stage are divided.

        >>> Plan(fused=range(0, 5), groups=(range(0, 2), range(2, 4))).tasks_a_stage
        2
        """
        return max(len(groups) or 1 for _, _, groups in self.phases())

    def for_mode(self, mode: Mode) -> "Plan":
        """Return a plan for fused calls as one for calls of `mode`, where its fused stage is an ordinary one.

        >>> plan = Plan((range(0, 3),), range(3, 5), (range(0, 3),))
        >>> plan.for_mode("train"), plan.for_mode("infer")
        (Plan(F[0:3] F[3:5] B[3:5] B[0:3]), Plan(F[0:3] F[3:5]))
        """
        if mode == "fused":
            return self
        tail = () if self.fused is None else (self.fused,)
        up = replace(self, forward=(*self.forward, *tail), fused=None, groups=())
        if mode == "infer":
            return replace(up, backward=(), backward_groups=())
        return replace(up, backward=(*tail, *self.backward))

    def check(self, num_layers: int, mode: Mode) -> None:
        """Raise `InvalidPlan` unless each of `num_layers` layers runs exactly once per direction of `mode`.

        >>> Plan((range(0, 3), range(4, 5))).check(num_layers=5, mode="infer")
        Traceback (most recent call last):
        rp_sched.errors.InvalidPlan: forward[1] is 4:5, so no stage runs layer 3; start it at 3

        `fused` is required in mode `fused` and forbidden in others; mode `infer` has no `backward`.
        """
        whole("num_layers", num_layers, least=1)
        check_mode(mode)
        if mode == "fused":
            self._check_fused(num_layers)
        else:
            self._check_unfused(num_layers, mode)

    def check_microbatches(self, microbatches: int) -> None:
        """Raise `InvalidPlan` unless the groups of each kind hold each of `microbatches` microbatches once.

        >>> Plan(fused=range(0, 5), groups=(range(0, 2),)).check_microbatches(4)
        Traceback (most recent call last):
        rp_sched.errors.InvalidPlan: groups must cover microbatch 0:4, but cover 0:2 instead; add 2:4
        """
        whole("microbatches", microbatches, least=1, bound=bounds.MICROBATCHES)
        for name in _GROUPS:
            groups: tuple[range, ...] = getattr(self, name)
            if groups:
                _check_cover(name, _labelled(name, groups), microbatches, unit="microbatch")

    def _check_fused(self, num_layers: int) -> None:
        if self.fused is None:
            raise InvalidPlan("mode 'fused' needs a fused stage that ends with the last layer, but fused is None")
        spans.check("fused", self.fused, error=InvalidPlan)
        if self.fused.stop != num_layers:
            raise InvalidPlan(
                f"fused is {spans.text(self.fused)}, but must end with the last layer, at {num_layers}"
            )
        self._check_forward(self.fused.start)
        self._check_backward(self.fused.start)

    def _check_unfused(self, num_layers: int, mode: Mode) -> None:
        if self.fused is not None or self.groups:
            raise InvalidPlan(
                f"mode {mode!r} has no fused stage and no groups, but the plan is {self!r}; remove them"
            )
        self._check_forward(num_layers)
        if mode == "train":
            self._check_backward(num_layers)
        elif self.backward or self.backward_groups:
            raise InvalidPlan(f"mode 'infer' has no backward stages, but the plan is {self!r}; remove them")

    def _check_forward(self, top: int) -> None:
        _check_cover("forward", _labelled("forward", self.forward), top, unit="layer")

    def _check_backward(self, top: int) -> None:
        labelled = _labelled("backward", self.backward)
        for (label, stage), (_, later) in pairwise(labelled):
            if later.start > stage.start:
                raise InvalidPlan(
                    f"backward runs from the last stage to the first, but {label} is {spans.text(stage)} "
                    f"and {spans.text(later)} follows; list them the other way round"
                )
        _check_cover("backward", labelled[::-1], top, unit="layer")


def _as_json(value: object) -> object:
    if isinstance(value, range):
        return [value.start, value.stop]
    return list(map(_as_json, cast(tuple[object, ...], value))) if isinstance(value, tuple) else value


def _decoded_range(value: Sequence[Any]) -> range:
    start, stop = value
    if type(start) is not int or type(stop) is not int:
        raise ValueError("ranges must have whole ends")
    return range(start, stop)


def _check_ranges(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        if not isinstance(value, range):
            raise TypeError(f"{name} must be made of ranges of layers or microbatches, but has {shown(value)}")


def _written(kind: TaskKind, stages: Iterable[range], groups: Iterable[range]) -> list[str]:
    return [
        *(f"{kind}[{spans.text(stage)}]" for stage in stages),
        *(f"m{spans.text(group)}" for group in groups),
    ]


def _labelled(name: str, stages: tuple[range, ...]) -> list[tuple[str, range]]:
    labelled = [(f"{name}[{index}]", stage) for index, stage in enumerate(stages)]
    for label, stage in labelled:
        spans.check(label, stage, error=InvalidPlan)
    return labelled


def _check_cover(name: str, labelled: list[tuple[str, range]], end: int, *, unit: str) -> None:
    """Raise `InvalidPlan` unless the ascending spans hold each number of `range(end)` exactly once."""
    expected = 0
    for label, span in labelled:
        if span.start > expected:
            where = f"no stage runs {unit} {expected}" if unit == "layer" else f"no group has {unit} {expected}"
            raise InvalidPlan(f"{label} is {spans.text(span)}, so {where}; start it at {expected}")
        if span.start < expected:
            raise InvalidPlan(
                f"{label} is {spans.text(span)}, so {unit} {span.start} appears twice; start it at {expected}"
            )
        expected = span.stop
    if expected != end:
        todo = f"add {expected}:{end}" if expected < end else f"remove {end}:{expected}"
        raise InvalidPlan(f"{name} must cover {unit} 0:{end}, but cover 0:{expected} instead; {todo}")
