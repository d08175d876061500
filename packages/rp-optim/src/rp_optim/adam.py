"""Adam and AdamW for parameters on the host, with torch's signatures, results and state."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

Scalar = float | torch.Tensor


def _refuse(name: str, capturable: bool, differentiable: bool) -> None:
    for flag, given in (("capturable", capturable), ("differentiable", differentiable)):
        if given:
            raise ValueError(f"{name} runs on the host, so {flag} must be False, but is True instead")


class Adam(torch.optim.Adam):
    """Adam (Kingma and Ba, 2015) in one fused pass over host memory.

    Takes the arguments of ``torch.optim.Adam``; `foreach` and `fused` are accepted and change nothing. Its
    ``state_dict`` and torch's load each other.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Adam([weight], lr=0.5)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])

    Raises `ValueError` for arguments out of range, and for `capturable` or `differentiable`.
    """

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
    ) -> None:
        _refuse(type(self).__name__, capturable, differentiable)
        del foreach, fused
        options: dict[str, Any] = {"decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True, **options)


class AdamW(Adam):
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
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
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
        )
