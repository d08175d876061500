"""What every optimizer on the host has in common: which parameters it takes, and how a step goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from rp_optim.checks import check_counter, check_memory, check_option_flags, check_state, is_plain, resolved
from rp_optim.gradients import gradient_of
from rp_optim.kernels.updates import Spot
from rp_optim.masters import by_arrival, link_of

# A group's options are what torch keeps there: numbers, flags, tensors and the list of parameters.
Group = dict[str, Any]
State = dict[str, Any]
Member = tuple[Group, torch.Tensor]

# Elements that are updated in one go. Waking the threads for each parameter took a third of a step on sixteen
# cores; much more than this would keep gradients that have come waiting for those that have not.
_TOGETHER = 1 << 28


@dataclass(frozen=True, slots=True)
class Taken:
    """A parameter that has a gradient, its group, and where the update happens."""

    group: Group
    parameter: torch.Tensor
    spot: Spot


class HostOptimizer(torch.optim.Optimizer):
    """A step that updates parameters in the order in which their gradients are there, some at a time."""

    # Whether the state has the number of steps, which `count_steps` counts.
    _counts_steps = False

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as in torch.

        Raises `InvalidParameter` for those that are not on the host, dense, contiguous and floating, and
        `InvalidOption` for options that the optimizer refuses.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                self._check_parameter(parameter)
        except BaseException:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loaded, unpickled or copied.
        for group in state["param_groups"]:
            self._check_group(group)
        super().__setstate__(state)

    def _check_group(self, group: Group) -> None:
        check_option_flags(type(self).__name__, group)

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        check_memory("a parameter", parameter)

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        """The state tensors that a step of this parameter reads, beside the count of its steps."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch overloads
        """Update every parameter that has a gradient.

        `closure` computes the loss and the gradients again; its result is returned.

        Raises `InvalidParameter` for a parameter, gradient, linked weight or state that cannot be taken, before
        anything is changed; only gradients that are still on their way, and their weights, are looked at later.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = list(self._members())
        for member in members:
            self._check_member(*member)
        for here in by_arrival(members, lambda member: member[1]):
            for some in _cut([found for member in here if (found := _take(*member)) is not None]):
                self._update_some(some)
        return loss

    def _check_member(self, group: Group, parameter: torch.Tensor) -> None:
        link = link_of(parameter)
        if (link is None or link.counts == "grad") and gradient_of(parameter) is None:
            return
        self._check_parameter(parameter)
        state = self.state.get(parameter, {})
        if self._counts_steps:
            check_counter(state.get("step"))
        for name, shape in self._state_shapes(group, parameter).items():
            if (tensor := state.get(name)) is not None:
                check_state(name, tensor, shape, parameter)

    def _members(self) -> Iterator[Member]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _update_some(self, taken: Sequence[Taken]) -> None:
        self._update(taken)
        for each in taken:
            link = link_of(each.parameter)
            if link is None or each.spot.weight is None:
                torch.autograd.graph.increment_version(each.parameter)
            else:
                link.written()

    def _update(self, taken: Sequence[Taken]) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero. Dropping does not look at them first."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for _, parameter in self._members():
            parameter.grad = None


def _cut(taken: Iterable[Taken]) -> Iterator[list[Taken]]:
    """Pieces of about `_TOGETHER` elements, none of which has a parameter twice."""
    piece: dict[int, Taken] = {}
    size = 0
    for each in taken:
        if size >= _TOGETHER or id(each.parameter) in piece:
            yield list(piece.values())
            piece, size = {}, 0
        piece[id(each.parameter)] = each
        size += each.spot.count
    if piece:
        yield list(piece.values())


def _take(group: Group, parameter: torch.Tensor) -> Taken | None:
    """Nothing without a gradient."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    link = link_of(parameter)
    weight = None if link is None else link.destination(parameter)
    factor = -gradient.factor if group.get("maximize") else gradient.factor
    return Taken(group, parameter, Spot(parameter, gradient.tensor, weight, factor))


def state_tensor(state: State, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor beside its parameter, contiguous, of its dtype; zeros where there was none."""
    tensor = state.get(name)
    if tensor is None:
        tensor = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
    elif tensor.dtype == parameter.dtype and is_plain(tensor):
        return tensor
    # Loaded, perhaps, from an optimizer whose parameter was laid out otherwise.
    state[name] = resolved(tensor.to(parameter.dtype)).contiguous()
    return state[name]


def count_steps(states: Sequence[State]) -> list[int]:
    """Count this step in each state, as the tensor that torch keeps there; returns their numbers, from 1 on."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    for state in states:
        if state.get("step") is None:
            state["step"] = torch.zeros((), dtype=dtype, device="cpu")
    steps: list[torch.Tensor] = [state["step"] for state in states]
    if len(set(map(id, steps))) < len(steps):
        # Loaded as one tensor, which each of them counts on.
        return [int(step.add_(1)) for step in steps]
    # All at once: an operation for each would let go of Python's lock as often.
    torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - torch's own optimizers use it
    if len({(step.dtype, step.device, step.shape) for step in steps}) > 1:
        return [int(step) for step in steps]
    return cast("list[int]", torch.stack(steps).flatten().long().tolist())  # pyright: ignore[reportUnknownMemberType]
