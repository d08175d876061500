"""`HostOptimizer`, the base class of optimizers on the host: checks parameters, and steps as gradients arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rp_optim.arrival import by_arrival
from rp_optim.checks import check_counter, check_memory, check_option_flags, check_state, is_plain, resolved
from rp_optim.errors import InvalidParameter
from rp_optim.gradients import ScaledGradient, gradient_of
from rp_optim.halves.remainders import Remainder, RemainderInMemory, begin_step, by_block, reached
from rp_optim.halves.split_master import halves_of, is_split_master
from rp_optim.kernels.kept import (
    check_can_be_small,
    check_kept,
    check_kind,
    convert,
    has_codes,
    kept,
    tensors_of,
)
from rp_optim.kernels.packed import Noise, StateKind
from rp_optim.kernels.updates import Small, Spot
from rp_optim.masters import is_elsewhere, link_of
from rp_optim.places.counters import count_steps, counter_dtype, nbytes_of_state
from rp_optim.places.loading import hidden, reveal
from rp_optim.places.on_disk import StateOption, read_option
from rp_optim.places.place import IN_MEMORY, Outline, StatePlace
from rp_optim.worker import wait_for_steps

# A parameter group of torch: numbers, flags, tensors and the list of parameters.
Group = dict[str, Any]
State = dict[str, Any]
Member = tuple[Group, torch.Tensor]

# Elements that one kernel call updates. With a call per parameter, waking the threads took a third of a step on
# sixteen cores. Much larger pieces would delay the first weights of a step.
_CALL_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Taken:
    """A parameter that has a gradient, with its group and the tensors of its update."""

    group: Group
    parameter: torch.Tensor
    spot: Spot

    def with_rest(self, rest: torch.Tensor | None) -> Taken:
        """Return the same with a remainder that came from disk; None: there is none, or it is in memory."""
        return self if rest is None else replace(self, spot=replace(self.spot, rest=rest))


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer whose step updates parameters in batches, as their gradients arrive."""

    # Whether the state has a "step" tensor, which `count_steps` increments. Small state always has one.
    _counts_steps = False
    # The format of state tensors.
    _kind: StateKind = "fp32"
    # Where they are. Copies of an optimizer have them in memory.
    _place: StatePlace = IN_MEMORY
    # Each parameter's index in the optimizer, by `id`, while a step with small state runs.
    _indices: dict[int, int] = {}  # noqa: RUF012 - replaced, never changed

    @property
    def state_kind(self) -> StateKind:
        """The format of state tensors: "fp32" (in the parameter's dtype), "bf16" or "8bit"."""
        return self._kind

    def _keep_state_as(self, state: StateOption) -> None:
        """Set the format of state tensors, and where they are. Must be called before torch's constructor."""
        kind, self._place = read_option(type(self).__name__, state)
        self._kind = check_kind(type(self).__name__, kind)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as in torch.

        Raises `InvalidParameter` for parameters that are not on the host, dense, contiguous and floating-point,
        and `InvalidOption` for options that the optimizer does not support.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if not is_elsewhere(parameter):
                    self._check_parameter(parameter)
        except BaseException:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        # For pickling and copying, which do not call the constructor.
        with self._place.whole(self.state) as states:
            return {**super().__getstate__(), "state": states, "_kind": self._kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called when the optimizer is loaded, unpickled or copied.
        for group in state["param_groups"]:
            self._check_group(group)
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, after waiting for the launched steps (unless it is called inside one).

        The tensors belong to the optimizer, and the next step changes them. Clone them to keep the values. State
        on disk is read into new memory; `deferred_state_dict` leaves it there.
        """
        wait_for_steps()
        with self._place.whole(self.state):
            return super().state_dict()

    def deferred_state_dict(self) -> dict[str, Any]:
        """Return the state as `state_dict` does, with `Deferred`s, readable until the next step, of the disk."""
        wait_for_steps()
        with self._place.deferred(self.state):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]  # torch disables dynamo
        """Load a state as in torch, after waiting for the launched steps.

        State in another format, such as torch's, is converted: rounded to nearest, or expanded to full precision.
        Tensors may be `Deferred`; they are read one parameter at a time. State on disk begins new files.
        """
        wait_for_steps()
        states: list[State] = [value for value in state_dict["state"].values() if isinstance(value, dict)]
        # Torch casts what it sees to the parameter's dtype.
        casts = self._kind == "fp32" and not any(map(has_codes, states))
        super().load_state_dict(state_dict if casts else {**state_dict, "state": hidden(state_dict["state"])})
        with self._place.renewed(self._outlines):
            for group, parameter in self._members():
                state = self.state.get(parameter, {})
                reveal(state, parameter, casts=casts)
                if not casts:
                    convert(state, self._state_shapes(group, parameter), self._kind, parameter.dtype)
                self._place.keep(self.state, parameter)
        self._forget_steps()

    def _forget_steps(self) -> None:
        """Drop step counters that only small state needs, if this optimizer's state is not small."""
        for group, parameter in self._members() if self._kind == "fp32" else ():
            if not self._counts(group):
                self.state.get(parameter, {}).pop("step", None)

    def _counts(self, group: Group) -> bool:
        """Return whether the group's parameters have a "step" tensor even if their state is not small."""
        del group
        return self._counts_steps

    def _check_group(self, group: Group) -> None:
        check_option_flags(type(self).__name__, group)

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        if halves_of(parameter) is None:
            check_memory("a parameter", parameter)
        check_can_be_small(self._kind, parameter)

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        """Return the names and shapes of the state tensors that a step of this parameter reads, except "step"."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch overloads
        """Update every parameter that has a gradient.

        `closure` recomputes the loss and the gradients. Its result is returned.

        Raises `InvalidParameter` for an unsupported parameter, gradient or state before any parameter changes.
        Linked gradients and weights are checked only when they are used, since they may arrive during the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = list(self._members())
        if self._kind != "fp32":
            self._indices = {id(parameter): index for index, (_, parameter) in enumerate(members)}
        for member in members:
            self._check_member(*member)
        self._place.begin_step(self.state, self._outlines)
        begin_step(_rest_of(parameter) for _, parameter in members)
        for arrived in by_arrival(members, lambda member: member[1]):
            for some in _cut([taken for member in arrived if (taken := _take(*member)) is not None]):
                for part in self._place.parts(some, _parameter_of):
                    for near in by_block(part, _rest_of_taken):
                        self._update_near(near)
        return loss

    def _update_near(self, taken: Sequence[Taken]) -> None:
        """Update parameters whose state and remainders can be in memory together."""
        with (
            self._place.reach(self.state, [each.parameter for each in taken]),
            reached([_rest_of_taken(each) for each in taken]) as rests,
        ):
            self._update_some([each.with_rest(rest) for each, rest in zip(taken, rests, strict=True)])

    def _check_member(self, group: Group, parameter: torch.Tensor) -> None:
        link = link_of(parameter)
        if is_elsewhere(parameter):
            return
        if (link is None or link.gradient_in == "grad") and gradient_of(parameter) is None:
            return
        self._check_parameter(parameter)
        state = self.state.get(parameter, {})
        if self._counts(group):
            check_counter(state.get("step"))
        for name, shape in self._state_shapes(group, parameter).items():
            if self._kind != "fp32":
                check_kept(state, name, shape, self._kind)
            elif (tensor := state.get(name)) is not None:
                check_state(name, tensor, shape, parameter)

    def state_bytes(self) -> int:
        """Return the bytes of host memory that the state takes once every parameter has been stepped."""
        return self._place.memory_bytes(self._outlines) + sum(map(self._counter_bytes, self._here()))

    def state_bytes_now(self) -> int:
        """Return the bytes of host memory that the state takes now."""
        return self._place.memory_bytes_now() + sum(map(nbytes_of_state, list(self.state.values())))

    def _here(self) -> list[Member]:
        return [member for member in self._members() if not is_elsewhere(member[1])]

    def _counter_bytes(self, member: Member) -> int:
        counts = self._counts(member[0]) or (self._kind != "fp32" and bool(self._state_shapes(*member)))
        return counter_dtype().itemsize if counts else 0

    def _outlines(self) -> dict[torch.Tensor, Outline]:
        """Return the tensors that each parameter's state has once it is stepped, except "step"."""
        return {parameter: self._outline(group, parameter) for group, parameter in self._here()}

    def _outline(self, group: Group, parameter: torch.Tensor) -> Outline:
        shapes = self._state_shapes(group, parameter)
        return {
            key: entry
            for name, shape in shapes.items()
            for key, entry in tensors_of(name, shape, self._kind, parameter.dtype).items()
        }

    def _count_small_steps(self, taken: Sequence[Taken]) -> list[int]:
        """Return step numbers for the noise, for an optimizer that otherwise does not count steps."""
        if self._kind == "fp32":
            return [0] * len(taken)
        counted = [bool(self._state_shapes(each.group, each.parameter)) for each in taken]
        numbers = iter(
            count_steps([self.state[each.parameter] for each, one in zip(taken, counted, strict=True) if one])
        )
        return [next(numbers) if one else 0 for one in counted]

    def _noise(self, parameter: torch.Tensor, step: int) -> Noise:
        return Noise.of(step, self._indices[id(parameter)])

    def _kept_state(self, taken: Taken, step: int) -> tuple[dict[str, torch.Tensor], Small | None]:
        """Return an update's state tensors by name, creating missing ones. `step`: the number for the noise."""
        state, shapes = self.state[taken.parameter], self._state_shapes(taken.group, taken.parameter)
        if self._kind == "fp32":
            return {name: state_tensor(state, name, taken.parameter) for name in shapes}, None
        tensors = {name: kept(state, name, shape, self._kind) for name, shape in shapes.items()}
        scales = tuple(each.scales for each in tensors.values() if each.scales is not None)
        return {name: each.tensor for name, each in tensors.items()}, Small(
            self._noise(taken.parameter, step), scales
        )

    def _members(self) -> Iterator[Member]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _update_some(self, taken: Sequence[Taken]) -> None:
        try:
            self._update(taken)
        except BaseException:
            # Some parameters may have been updated; code that compares versions must see that.
            for each in taken:
                torch.autograd.graph.increment_version(each.parameter)
            raise
        for each in taken:
            _note_updated(each.parameter, each.spot)

    def _update(self, taken: Sequence[Taken]) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None (linked ones are not copied first), or to zero if `set_to_none` is False."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for _, parameter in self._members():
            parameter.grad = None


def _parameter_of(taken: Taken) -> torch.Tensor:
    return taken.parameter


def _rest_of_taken(taken: Taken) -> Remainder | None:
    return _rest_of(taken.parameter)


def _rest_of(parameter: torch.Tensor) -> Remainder | None:
    halves = halves_of(parameter)
    return None if halves is None else halves[1]


def _cut(taken: Iterable[Taken]) -> Iterator[list[Taken]]:
    """Split into lists of about `_CALL_ELEMENTS` elements, none with a parameter twice."""
    piece: dict[int, Taken] = {}
    size = 0
    for each in taken:
        if size >= _CALL_ELEMENTS or id(each.parameter) in piece:
            yield list(piece.values())
            piece, size = {}, 0
        piece[id(each.parameter)] = each
        size += each.spot.count
    if piece:
        yield list(piece.values())


def _take(group: Group, parameter: torch.Tensor) -> Taken | None:
    """Collect the tensors of a parameter's update; None if it has no gradient."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    link = link_of(parameter)
    if link is None and is_split_master(parameter) and not parameter.steps_unlinked:
        parameter.make_whole("a step outside of a step function")
    weight = None if link is None else link.destination(parameter)
    factor = -gradient.factor if group.get("maximize") else gradient.factor
    return Taken(group, parameter, _spot(parameter, gradient, weight, factor))


def _note_updated(parameter: torch.Tensor, spot: Spot) -> None:
    """Tell who reads the parameter or the weight that it is linked to that the kernel has written them."""
    has_written = spot.weight is not None and spot.weight is not spot.param
    if has_written and spot.is_halved:
        assert is_split_master(parameter)
        assert spot.weight is not None
        parameter.move_to(spot.weight)
    link = link_of(parameter)
    if link is None or not has_written:
        torch.autograd.graph.increment_version(parameter)
    else:
        link.written()
    if link is not None and link.stepped is not None:
        link.stepped()


def _spot(parameter: torch.Tensor, gradient: ScaledGradient, weight: torch.Tensor | None, factor: float) -> Spot:
    halves = halves_of(parameter)
    if halves is None:
        return Spot(parameter, gradient.tensor, weight, factor, gradient.more, None, is_split_master(parameter))
    upper, rest = halves
    here = rest.values if isinstance(rest, RemainderInMemory) else None
    return Spot(upper, gradient.tensor, _target(weight, upper), factor, gradient.more, here)


def _target(weight: torch.Tensor | None, upper: torch.Tensor) -> torch.Tensor:
    """Return the tensor for the new upper half: `upper` itself for an update in place."""
    if weight is None:
        return upper
    if weight.dtype != torch.bfloat16:
        raise InvalidParameter(
            f"the weight that a split master is linked to must be bf16, but is {weight.dtype} instead; use Master"
        )
    return upper if weight.data_ptr() == upper.data_ptr() else weight


def state_tensor(state: State, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the state tensor `name`, contiguous and of the parameter's dtype; new zeros if there was none."""
    tensor = state.get(name)
    if tensor is None:
        tensor = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
    elif tensor.dtype == parameter.dtype and is_plain(tensor):
        return tensor
    # The state may have been loaded from an optimizer whose parameter had other strides or another dtype.
    state[name] = resolved(tensor.to(parameter.dtype)).contiguous()
    return state[name]
