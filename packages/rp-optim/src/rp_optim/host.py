"""What every optimizer on the host has in common: which parameters it takes, and how a step goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rp_optim.checks import check_beside, check_memory
from rp_optim.gradients import Gradient, flat, gradient_of
from rp_optim.masters import by_arrival, link_of
from rp_optim.updates import Spot

# A group's options are what torch keeps there: numbers, flags, tensors and the list of parameters.
Group = dict[str, Any]
State = dict[str, Any]


class HostOptimizer(torch.optim.Optimizer):
    """A step that updates one parameter after the other, in the order in which their gradients are there."""

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
        for group, parameter in by_arrival(members, lambda member: member[1]):
            self._update_one(group, parameter)
        return loss

    def _members(self) -> Iterator[tuple[Group, torch.Tensor]]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _update_one(self, group: Group, parameter: torch.Tensor) -> None:
        gradient = gradient_of(parameter)
        if gradient is None:
            return
        check_memory("a parameter", parameter)
        link = link_of(parameter)
        weight = None if link is None else link.destination(parameter)
        self._update(group, parameter, _spot(parameter, gradient, weight))
        if link is None or weight is None:
            torch.autograd.graph.increment_version(parameter)
        else:
            link.written()

    def _update(self, group: Group, parameter: torch.Tensor, spot: Spot) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero. Dropping does not look at them first."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for _, parameter in self._members():
            parameter.grad = None


def _spot(parameter: torch.Tensor, gradient: Gradient, weight: torch.Tensor | None) -> Spot:
    destination = None if weight is None else flat(weight)
    return Spot(flat(parameter), flat(gradient.tensor), destination, gradient.factor)


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


def negated_to_maximize(spot: Spot, maximize: bool) -> Spot:
    """The spot with its gradient's sign turned if `maximize`."""
    return Spot(spot.param, spot.grad, spot.weight, -spot.factor) if maximize else spot
