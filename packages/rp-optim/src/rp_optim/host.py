"""What every optimizer on the host has in common: which parameters it takes, and how a step goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rp_optim.checks import check_beside, check_memory
from rp_optim.gradients import flat, gradient_of
from rp_optim.masters import by_arrival, link_of
from rp_optim.updates import Spot

# A group's options are what torch keeps there: numbers, flags, tensors and the list of parameters.
Group = dict[str, Any]
State = dict[str, Any]
Member = tuple[Group, torch.Tensor]

# Elements that are updated in one go. Waking the threads for each parameter took a third of a step on sixteen
# cores; much more than this would keep a weight from being written while others are still in use.
_TOGETHER = 1 << 24


@dataclass(frozen=True, slots=True)
class Taken:
    """A parameter that has a gradient, its group, and where the update happens."""

    group: Group
    parameter: torch.Tensor
    spot: Spot


class HostOptimizer(torch.optim.Optimizer):
    """A step that updates parameters in the order in which their gradients are there, some at a time."""

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as in torch.

        Raises `InvalidParameter` for those that are not on the host, dense, contiguous and floating.
        """
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_memory("a parameter", parameter)
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch overloads
        """Update every parameter that has a gradient.

        `closure` computes the loss and the gradients again; its result is returned.

        Raises `InvalidParameter` for a gradient that cannot be taken; unless gradients are still on their way,
        before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = list(self._members())
        for _, parameter in members:
            link = link_of(parameter)
            if link is None or link.counts == "grad":
                gradient_of(parameter)
        for here in by_arrival(members, lambda member: member[1]):
            for some in _cut(here):
                self._update_some(some)
        return loss

    def _members(self) -> Iterator[Member]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _update_some(self, members: Sequence[Member]) -> None:
        taken = [found for member in members if (found := _take(*member)) is not None]
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


def _cut(members: Iterable[Member]) -> Iterator[list[Member]]:
    """Pieces of about `_TOGETHER` elements."""
    piece: list[Member] = []
    size = 0
    for member in members:
        piece.append(member)
        size += member[1].numel()
        if size >= _TOGETHER:
            yield piece
            piece, size = [], 0
    yield piece


def _take(group: Group, parameter: torch.Tensor) -> Taken | None:
    """Nothing without a gradient."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    check_memory("a parameter", parameter)
    link = link_of(parameter)
    weight = None if link is None else link.destination(parameter)
    destination = None if weight is None else flat(weight)
    factor = -gradient.factor if group.get("maximize") else gradient.factor
    return Taken(group, parameter, Spot(flat(parameter), flat(gradient.tensor), destination, factor))


def state_tensor(state: State, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor beside its parameter, zeros where there was none; returns a flat, real view of it.

    Raises `InvalidParameter` for one that was loaded and does not fit.
    """
    tensor = state.get(name)
    if tensor is None:
        tensor = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
    elif not tensor.is_contiguous() or tensor.dtype != parameter.dtype:
        # Loaded from an optimizer whose parameter was laid out otherwise.
        tensor = tensor.to(parameter.dtype).contiguous()
    check_beside(f"the state {name!r}", tensor, parameter)
    state[name] = tensor
    return flat(tensor)


def count_step(state: State) -> int:
    """Count this step in the state, as the tensor that torch keeps there; returns its number, from 1 on."""
    step = state.get("step")
    if step is None:
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        step = state["step"] = torch.zeros((), dtype=dtype)
    step += 1
    return int(step)
