"""Predict the size of an optimizer's state before its first step, for this package's optimizers and torch's."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from typing import Any, cast

import torch

from rp_optim.host import Group, HostOptimizer
from rp_optim.masters import is_elsewhere
from rp_optim.places.counters import nbytes_of_state


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of the optimizer's state once it has stepped all its parameters; None if unknown.

    Known for this package's optimizers, and for those in ``torch.optim`` whose step needs no closure. A copy of
    these steps once on the meta device, where tensors have no memory, unless their constructor creates the state,
    as torch's Adagrad does. The optimizer itself does not change.

    >>> weight = torch.nn.Parameter(torch.zeros(10, 10))
    >>> state_bytes(torch.optim.SGD([weight], momentum=0.9))
    400
    >>> state_bytes(torch.optim.LBFGS([weight])) is None
    True
    """
    if isinstance(optimizer, HostOptimizer):
        return optimizer.state_bytes()
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return None
    try:
        return sum(_of_group(optimizer, group) for group in optimizer.param_groups)
    except Exception:  # Torch does not document what its optimizers raise on the meta device.
        return _existing_bytes(optimizer)


def _existing_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: list[dict[str, Any]] = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return sum(map(nbytes_of_state, states)) if all(states) else None


def _of_group(optimizer: torch.optim.Optimizer, group: Group) -> int:
    # Parameters of one shape have states of one size, and a model has thousands of parameters but few shapes.
    here = [parameter for parameter in group["params"] if not is_elsewhere(parameter)]
    counts = Counter((parameter.shape, parameter.dtype) for parameter in here)
    tried = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in counts]
    states = _step_once(optimizer, group, tried)
    return sum(
        count * nbytes_of_state(states[parameter]) for parameter, count in zip(tried, counts.values(), strict=True)
    )


def _step_once(
    optimizer: torch.optim.Optimizer, group: Group, parameters: list[torch.nn.Parameter]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Step these parameters in a copy of the optimizer; return their states."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    plain = {name: False for name in ("foreach", "fused", "capturable") if name in group}
    twin.param_groups = [{**group, **plain, "params": parameters}]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        # The class's own function, without hooks and without the wrappers of learning rate schedulers.
        with torch.no_grad():
            inspect.unwrap(type(twin).step)(twin)
    except RuntimeError:
        # Adafactor reads values, which meta tensors lack, after it has created its state.
        if not all(twin.state[parameter] for parameter in parameters):
            raise
    return cast("dict[torch.Tensor, dict[str, Any]]", twin.state)
