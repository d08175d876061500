"""Refuse settings of Lightning that cannot work with RoundPipe, before training begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rp_trainer.options import RoundPipeOptions
from rp_trainer.refusals import refuse_optimizer

_ONE_PROCESS = "RoundPipe drives all GPUs from one process, see RoundPipeOptions(runtime=...)"


def refuse_several(argument: str, value: int) -> None:
    """Raise `ValueError` for an argument of a Lightning `Trainer` that must be 1."""
    if value != 1:
        raise ValueError(f"{argument} must be 1 with RoundPipeStrategy, but is {value}; omit it: {_ONE_PROCESS}")


def refuse_options(options: RoundPipeOptions) -> None:
    """Raise `ValueError` for an option that cannot work in Lightning's loop."""
    if options.step_in_backward:
        raise ValueError(
            "step_in_backward must be False with RoundPipeStrategy, but is True: Lightning calls training_step, "
            "backward and the optimizer one after the other, and RoundPipe then steps in the call; omit it"
        )


def refuse_processes() -> None:
    """Raise `ValueError` if several processes were started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is more than 1; start the script with python, not with torchrun: {_ONE_PROCESS}"
        )


def chosen(module: nn.Module, name: str | None) -> str:
    """Return the name of the submodule to train: `name`, or the LightningModule's only child with parameters.

    Raises `ValueError` if there is none, if there are several, or if parameters outside of it train, too.
    """
    name = _only_child(module) if name is None else _known(module, name)
    model = module.get_submodule(name)
    inside = set(model.parameters())
    for other, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in inside:
            raise ValueError(
                f"{other} of {type(module).__name__} trains outside of {name}, but RoundPipeStrategy trains one "
                f"module: put it into {name}, or freeze it"
            )
    return name


def _only_child(module: nn.Module) -> str:
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    if len(children) == 1:
        return children[0]
    problem = f"has parameters in {', '.join(children)}" if children else "has no child with parameters"
    raise ValueError(
        f"RoundPipeStrategy trains one submodule, but {type(module).__name__} {problem}; name the one that "
        'trains, as in RoundPipeStrategy("model"), or put all trained modules into one'
    )


def _known(module: nn.Module, name: str) -> str:
    try:
        module.get_submodule(name)
    except AttributeError as error:
        children = ", ".join(other for other, _ in module.named_children())
        raise ValueError(f"{type(module).__name__} has no submodule {name!r}; it has {children}") from error
    return name


def only_optimizer(optimizers: Sequence[Any]) -> Any:
    """Return the only optimizer of a training.

    Raises `ValueError` if there are several, or if it changes parameters outside of steps or needs several passes.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers must return one optimizer with RoundPipeStrategy, but returned "
            f"{len(optimizers)}; give one optimizer several groups"
        )
    refuse_optimizer(optimizers[0])
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ValueError(
            "configure_optimizers returned LBFGS, which runs the model several times within one step; use another"
        )
    return optimizers[0]
