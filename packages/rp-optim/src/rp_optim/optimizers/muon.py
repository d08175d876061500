"""Muon for matrices on the host, with torch's signature, numbers and state, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from rp_optim.checks import at_least, check_betas, check_option_flags
from rp_optim.errors import InvalidOption, InvalidParameter
from rp_optim.host import Group, State, Taken
from rp_optim.kernels.kernel import kernel_for
from rp_optim.kernels.updates import MomentumUpdate, ParameterMove, Spot
from rp_optim.optimizers.adam import AdamSteps
from rp_optim.optimizers.newton_schulz import NewtonSchulz, dtype_here
from rp_optim.places.on_disk import StateOption

Scalar = float | torch.Tensor

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_RATES = ("original", "match_rms_adamw", "spectral_unclamped")
_NS_DTYPES = (torch.bfloat16, torch.float32)
# Defaults of a group with use_muon=False: those of AdamW.
_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "decoupled_weight_decay": True}


class Muon(AdamSteps, torch.optim.Muon):
    """Muon (Jordan et al., 2024) for matrices, and AdamW for everything else, in one optimizer.

    A group of parameters with ``use_muon=True``, the default, has the arguments of ``torch.optim.Muon`` and takes
    its steps. Its parameters are matrices, or stacks of them (3 dimensions) such as the weights of experts. A
    group with ``use_muon=False`` has AdamW's `lr`, `betas`, `eps`, `weight_decay` and `amsgrad`; embeddings,
    heads, norms and biases belong there. `muon_groups` makes both groups from a model. With
    ``adjust_lr_fn="match_rms_adamw"``, AdamW's `lr` and `weight_decay` suit both. Otherwise Muon's `lr` is much
    larger, so AdamW's groups need their own.

    The ``state_dict`` and that of ``torch.optim.Muon`` can load each other if all parameters are matrices.
    `foreach` and `fused` are accepted and change nothing. `state`: as for `rp_optim.Adam`. `ns_dtype`: the dtype
    of the Newton-Schulz iteration, bf16 or fp32. None: bf16, as in torch, if the processor multiplies bf16
    matrices fast (AMX), else fp32. The iteration takes most of a step (benchmarks/results/performance.md). Its
    matrix products are torch's, so the last bits depend on the processor, unlike those of this package's other
    optimizers.

    >>> layer = torch.nn.Linear(2, 2)
    >>> groups = [{"params": [layer.weight]}, {"params": [layer.bias], "use_muon": False, "lr": 3e-4}]
    >>> optimizer = Muon(groups, lr=0.02)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()

    Raises `ValueError` as `rp_optim.Adam` does, for complex parameters, and for those that are not matrices but in
    a group with ``use_muon=True``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateOption = "fp32",
    ) -> None:
        self._keep_state_as(state)
        check_option_flags("Muon", {"capturable": capturable, "differentiable": differentiable})
        del foreach, fused
        self._ns_dtype = _checked_dtype(ns_dtype)
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        _check_muon(defaults)
        # Torch's constructor of Muon refuses everything but matrices.
        torch.optim.Optimizer.__init__(self, params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ns_dtype": self._ns_dtype}

    def __setstate__(self, state: State) -> None:
        for group in state["param_groups"]:
            # A state of torch's Muon has no such entry.
            group.setdefault("use_muon", True)
        super().__setstate__(state)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters. ``use_muon``: whether it takes Muon's steps or AdamW's."""
        # Torch raises the error if it is not a dict.
        if isinstance(param_group, dict) and not param_group.setdefault("use_muon", True):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._check_rate(param_group)
            for name, value in _ADAMW.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)

    def _check_rate(self, group: Group) -> None:
        if "lr" not in group and self.defaults["adjust_lr_fn"] != "match_rms_adamw":
            raise InvalidOption(
                "Muon needs an lr in each group with use_muon=False, since Muon's lr does not suit AdamW, but a "
                "group has none; add one, such as 'lr': 3e-4, or set adjust_lr_fn='match_rms_adamw', whose lr "
                "suits both"
            )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["use_muon"]:
            _check_muon(group)
            for parameter in group["params"]:
                _check_matrix(parameter)
            return
        at_least("Muon", 0.0, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"])
        check_betas("Muon", group["betas"])

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        super()._check_parameter(parameter)
        if parameter.is_complex():
            raise InvalidParameter(f"Muon needs real parameters, but one is {parameter.dtype}; use Adam for it")

    def _counts(self, group: Group) -> bool:
        return not group["use_muon"]

    def _state_shapes(self, group: Group, parameter: torch.Tensor) -> dict[str, Sequence[int]]:
        if group["use_muon"]:
            return {"momentum_buffer": parameter.shape}
        return self._adam_shapes(group, parameter)

    def _update_some(self, taken: Sequence[Taken]) -> None:
        # One matrix takes as long as all of AdamW's parameters together. Update one by one, so that weights are
        # ready soon.
        super()._update_some([each for each in taken if not each.group["use_muon"]])
        for each in taken:
            if each.group["use_muon"]:
                super()._update_some([each])

    def _update(self, taken: Sequence[Taken]) -> None:
        for each in taken:
            if not each.group["use_muon"]:
                self._step_by_adam(taken)
                return
            self._update_matrix(each)

    def _update_matrix(self, taken: Taken) -> None:
        group, spot = taken.group, taken.spot
        (step,) = self._count_small_steps([taken])
        buffers, small = self._kept_state(taken, step)
        if spot.count == 0:
            return
        update = torch.empty(taken.parameter.shape, dtype=self._ns_dtype or dtype_here(), device="cpu")
        # Only the parameter's dtype matters here. For one in halves it is fp32, that of its buffer in full
        # precision.
        like = buffers["momentum_buffer"] if spot.is_halved and small is None else spot.param
        begun = Spot(like, spot.grad, update, spot.factor, spot.more)
        keep, nesterov = float(group["momentum"]), bool(group["nesterov"])
        kernel_for(begun).momentum(MomentumUpdate(begun, keep, nesterov, buffers["momentum_buffer"], small))
        iteration_of(group).orthogonalize_(update.view(-1, *update.shape[-2:]))
        moved = replace(spot, grad=update, factor=1.0, more=None)
        kernel_for(moved).move(moved, _move(group, update.shape))


def iteration_of(group: Group) -> NewtonSchulz:
    """Return the Newton-Schulz iteration for a group's matrices."""
    a, b, c = map(float, group["ns_coefficients"])
    return NewtonSchulz((a, b, c), int(group["ns_steps"]), float(group["eps"]))


def _move(group: Group, shape: Sequence[int]) -> ParameterMove:
    lr = float(group["lr"])
    return ParameterMove(
        shrink=1 - lr * float(group["weight_decay"]), rate=lr * _relative_rate(group, *shape[-2:])
    )


def _relative_rate(group: Group, rows: int, cols: int) -> float:
    """Return the factor on the learning rate for a matrix of this shape, by torch's rules.

    "original": Jordan's. "match_rms_adamw": updates are as large as AdamW's (Liu et al., 2025, arXiv
    2502.16982). "spectral_unclamped": Bernstein's.
    """
    rule = group["adjust_lr_fn"]
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols if rule == "spectral_unclamped" else max(1.0, rows / cols))


# Checks


def _check_muon(group: Group) -> None:
    at_least("Muon", 0.0, lr=group["lr"], weight_decay=group["weight_decay"], momentum=group["momentum"])
    if group["adjust_lr_fn"] not in (None, *_RATES):
        raise InvalidOption(
            f"Muon needs adjust_lr_fn to be None or one of {', '.join(_RATES)}, but has {group['adjust_lr_fn']!r} "
            "instead"
        )
    if len(group["ns_coefficients"]) != 3:
        raise InvalidOption(f"Muon needs three ns_coefficients, but has {len(group['ns_coefficients'])} instead")
    if not 0 <= group["ns_steps"] < 100:
        raise InvalidOption(f"Muon needs 0 <= ns_steps < 100, but has {group['ns_steps']} instead")


def _check_matrix(parameter: torch.Tensor) -> None:
    if parameter.dim() not in (2, 3):
        raise InvalidParameter(
            "Muon needs matrices (2 dimensions) or stacks of them (3), but a parameter has the shape "
            f"{tuple(parameter.shape)}; put it into a group with use_muon=False, or let muon_groups(model) make "
            "the groups"
        )


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, *_NS_DTYPES):
        raise InvalidOption(f"Muon needs ns_dtype to be torch.bfloat16 or torch.float32, but has {dtype} instead")
    return dtype
