"""Lion for parameters on the host, with its authors' signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from rp_optim.checks import at_least, check_betas, check_option_flags
from rp_optim.host import Group, HostOptimizer, Taken
from rp_optim.kernels.kernel import by_kernel
from rp_optim.kernels.updates import LionNumbers, LionUpdate
from rp_optim.places.on_disk import StateOption

Scalar = float | torch.Tensor


class Lion(HostOptimizer):
    """Lion (Chen et al., 2023, algorithm 2): steps by the sign of a momentum, in one pass over host memory.

    Torch has no Lion; the signature and the state (``exp_avg``) are the authors'. `foreach` and `fused` are
    accepted and change nothing. Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as
    many times larger. `state`: as for `rp_optim.Adam`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Lion([weight], lr=0.5)
    >>> weight.grad = torch.tensor([3.0, -0.1])
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 1.5000])

    Raises `ValueError` as `rp_optim.Adam` does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-4,
        betas: tuple[Scalar, Scalar] = (0.9, 0.99),
        weight_decay: Scalar = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateOption = "fp32",
    ) -> None:
        self._keep_state_as(state)
        check_option_flags("Lion", {"capturable": capturable, "differentiable": differentiable})
        del foreach, fused
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        self._check_group(defaults)
        super().__init__(params, defaults)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        at_least("Lion", 0.0, lr=group["lr"], weight_decay=group["weight_decay"])
        check_betas("Lion", group["betas"])

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        del group
        return {"exp_avg": parameter.shape}

    def _update(self, taken: Sequence[Taken]) -> None:
        steps = self._count_small_steps(taken)
        for kernel, updates in by_kernel(map(self._one, taken, steps)):
            kernel.lion(updates)

    def _one(self, taken: Taken, step: int) -> LionUpdate:
        moments, small = self._kept_state(taken, step)
        return LionUpdate(taken.spot, _numbers(taken.group), **moments, small=small)


def _numbers(group: Group) -> LionNumbers:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return LionNumbers(
        shrink=1 - lr * float(group["weight_decay"]), rate=lr, beta1=float(beta1), beta2=float(beta2)
    )
