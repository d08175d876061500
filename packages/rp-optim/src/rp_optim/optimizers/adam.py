"""Adam and AdamW for parameters on the host, with torch's signatures, results and state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from rp_optim.checks import check_option_flags
from rp_optim.host import Group, HostOptimizer, Taken
from rp_optim.kernels.kernel import by_kernel
from rp_optim.kernels.updates import AdamNumbers, AdamUpdate
from rp_optim.places.counters import count_steps
from rp_optim.places.on_disk import StateOption

Scalar = float | torch.Tensor

_STATE = ("exp_avg", "exp_avg_sq")
_AMSGRAD_STATE = (*_STATE, "max_exp_avg_sq")


class AdamSteps(HostOptimizer):
    """Base of the optimizers that update some or all of their parameters with Adam."""

    def _adam_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        return dict.fromkeys(_AMSGRAD_STATE if group["amsgrad"] else _STATE, parameter.shape)

    def _step_by_adam(self, taken: Sequence[Taken]) -> None:
        steps = count_steps([self.state[each.parameter] for each in taken])
        # Nearly all parameters share a group and a step number, so the numbers are computed once per pair.
        alike = {(id(each.group), step): each.group for each, step in zip(taken, steps, strict=True)}
        numbers = {key: _numbers(group, key[1]) for key, group in alike.items()}
        updates = [
            self._one_by_adam(each, numbers[id(each.group), step], step)
            for each, step in zip(taken, steps, strict=True)
        ]
        for kernel, some in by_kernel(updates):
            kernel.adam(some)

    def _one_by_adam(self, taken: Taken, numbers: AdamNumbers, step: int) -> AdamUpdate:
        moments, small = self._kept_state(taken, step)
        return AdamUpdate(taken.spot, numbers, **moments, small=small)


class Adam(AdamSteps, torch.optim.Adam):
    """Adam (Kingma and Ba, 2015) in one pass over host memory.

    Takes the arguments of ``torch.optim.Adam``; `foreach` and `fused` are accepted and change nothing. Its
    ``state_dict`` and torch's can load each other. `state`: the format of the moments: "fp32" (the parameter's
    dtype, exact), or rounded to "bf16" or "8bit" (1 1/16 bytes per number); docs/memory.md has the cost in
    accuracy. ``"disk:DIR[,DIR...]"`` has them in files there, ``"8bit disk:DIR"`` in that format; see `Disk`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Adam([weight], lr=0.5)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])

    Raises `ValueError` for arguments out of range, for `capturable` and `differentiable`, and for parameters
    that are not on the host, dense, contiguous and floating-point.
    """

    _counts_steps = True

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-3,
        betas: tuple[Scalar, Scalar] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state: StateOption = "fp32",
    ) -> None:
        self._keep_state_as(state)
        check_option_flags(type(self).__name__, {"capturable": capturable, "differentiable": differentiable})
        del foreach, fused
        options: dict[str, Any] = {"decoupled_weight_decay": decoupled_weight_decay}
        # Not super(), which would call torch's AdamW from our AdamW, and its options differ.
        torch.optim.Adam.__init__(
            self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options
        )

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        return self._adam_shapes(group, parameter)

    def _update(self, taken: Sequence[Taken]) -> None:
        self._step_by_adam(taken)


def _numbers(group: Group, step: int) -> AdamNumbers:
    lr, beta1, beta2 = float(group["lr"]), float(group["betas"][0]), float(group["betas"][1])
    decay, decoupled = float(group["weight_decay"]), group["decoupled_weight_decay"]
    return AdamNumbers(
        l2=0.0 if decoupled else decay,
        shrink=1 - lr * decay if decoupled else 1.0,
        rate=lr / (1 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        root=1 / math.sqrt(1 - beta2**step),
        eps=float(group["eps"]),
    )


class AdamW(Adam, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): torch's ``AdamW`` on the host.

    >>> AdamW([torch.nn.Parameter(torch.ones(2))]).param_groups[0]["weight_decay"]
    0.01
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-3,
        betas: tuple[Scalar, Scalar] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateOption = "fp32",
    ) -> None:
        Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            state=state,
        )
