"""SGD for parameters on the host, with torch's signature, results and state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from rp_optim.checks import check_option_flags
from rp_optim.host import Group, HostOptimizer, Taken
from rp_optim.kernels.kept import is_missing
from rp_optim.kernels.kernel import by_kernel
from rp_optim.kernels.updates import SGDNumbers, SGDUpdate
from rp_optim.places.on_disk import StateOption

Scalar = float | torch.Tensor


class SGD(HostOptimizer, torch.optim.SGD):
    """Stochastic gradient descent, with momentum (Sutskever et al., 2013), in one pass over host memory.

    Takes the arguments of ``torch.optim.SGD``; `foreach` and `fused` are accepted and change nothing. Its
    ``state_dict`` and torch's load each other. `state`: as for `rp_optim.Adam`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = SGD([weight], lr=0.5, momentum=0.9)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])

    Raises `ValueError` as `rp_optim.Adam` does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: Scalar = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateOption = "fp32",
    ) -> None:
        self._keep_state_as(state)
        check_option_flags(type(self).__name__, {"differentiable": differentiable})
        del foreach, fused
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        return {"momentum_buffer": parameter.shape} if float(group["momentum"]) != 0 else {}

    def _update(self, taken: Sequence[Taken]) -> None:
        steps = self._count_small_steps(taken)
        for kernel, updates in by_kernel(map(self._one, taken, steps)):
            kernel.sgd(updates)

    def _one(self, taken: Taken, step: int) -> SGDUpdate:
        group, parameter = taken.group, taken.parameter
        if float(group["momentum"]) == 0:
            return SGDUpdate(taken.spot, _numbers(group, first=False))
        state = self.state[parameter]
        first = is_missing(state, "momentum_buffer")
        if first and self._kind == "fp32":
            # The first step writes it before reading it, so it needs no zeros.
            state["momentum_buffer"] = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        buffers, small = self._kept_state(taken, step)
        return SGDUpdate(taken.spot, _numbers(group, first=first), buffers["momentum_buffer"], small)


def _numbers(group: Group, *, first: bool) -> SGDNumbers:
    return SGDNumbers(
        l2=float(group["weight_decay"]),
        rate=float(group["lr"]),
        keep=float(group["momentum"]),
        gain=1 - float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
        first=first,
    )
