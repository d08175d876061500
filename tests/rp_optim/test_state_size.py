"""The size of an optimizer's state is told before its first step, as it is after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rp_optim
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import training


def muon_of_groups(groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Muon's steps for matrices and stacks of them, in whichever group, and AdamW's for the others."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return training.muon(parameters, **options)


SHAPES = [(3, 5), (7,), (3, 5), (2, 3, 4, 4), ()]
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": rp_optim.Adam,
    "AdamW with amsgrad": lambda params: rp_optim.AdamW(params, amsgrad=True),
    "SGD": rp_optim.SGD,
    "SGD with momentum": lambda params: rp_optim.SGD(params, momentum=0.9),
    "Lion": rp_optim.Lion,
    "Adafactor": rp_optim.Adafactor,
    "Adam in bf16": lambda params: rp_optim.Adam(params, state="bf16"),
    "AdamW with amsgrad in 8 bits": lambda params: rp_optim.AdamW(params, amsgrad=True, state="8bit"),
    "SGD in 8 bits": lambda params: rp_optim.SGD(params, state="8bit"),
    "SGD with momentum in 8 bits": lambda params: rp_optim.SGD(params, momentum=0.9, state="8bit"),
    "Lion in 8 bits": lambda params: rp_optim.Lion(params, state="8bit"),
    "Adafactor in bf16": lambda params: rp_optim.Adafactor(params, state="bf16"),
    "Muon": muon_of_groups,
    "Muon in 8 bits": lambda params: muon_of_groups(params, state="8bit"),
    "Adafactor in 8 bits": lambda params: rp_optim.Adafactor(params, state="8bit"),
    "torch's Adam": torch.optim.Adam,
    "torch's AdamW in one kernel": lambda params: torch.optim.AdamW(params, fused=True),
    "torch's SGD": torch.optim.SGD,
    "torch's SGD with momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    "torch's Adafactor": torch.optim.Adafactor,
    "torch's RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "torch's Adagrad": torch.optim.Adagrad,
    "torch's NAdam": torch.optim.NAdam,
}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def held(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    )


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_as_large_as_it_was_told_to_become(make: Callable[..., Any], dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = make([{"params": params[:2], "lr": 0.5}, {"params": params[2:]}])
    before = held(optimizer)
    told = rp_optim.state_bytes(optimizer)
    # Torch's Adagrad makes its state when it is made.
    assert held(optimizer) == before
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert told == held(optimizer)


def test_a_scheduler_and_hooks_do_not_notice() -> None:
    optimizer = torch.optim.Adam(parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(2))
    try:
        assert rp_optim.state_bytes(optimizer) == 2 * 4 * (15 + 7 + 15 + 96 + 1) + 5 * 4
    finally:
        handle.remove()
    assert seen == []
    assert scheduler.last_epoch == 0
    assert scheduler.get_last_lr() == [1e-3]


def test_of_what_is_not_known_nothing_is_told() -> None:
    class Own(torch.optim.SGD):
        """A subclass outside of torch, which may do anything in its step."""

    assert rp_optim.state_bytes(Own(parameters())) is None
    assert rp_optim.state_bytes(torch.optim.LBFGS(parameters())) is None
