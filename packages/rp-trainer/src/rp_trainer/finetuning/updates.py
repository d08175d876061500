"""The optimizer of a fine-tuning: its groups of parameters, and its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from roundpipe import RoundPipe, optim
from rp_optim import OPTIMIZERS, Disk, DiskError
from rp_optim.kernels.packed import StateKind
from rp_optim.places.on_disk import StateOption
from torch import nn

from rp_trainer.errors import Diverged, Refused
from rp_trainer.finetuning.settings import Settings, refuse_unknown
from rp_trainer.optimizer import SteppedByEngine


def stepped(model: RoundPipe, settings: Settings) -> SteppedByEngine:
    """Create the optimizer that the settings name, over the model's masters, stepped by the engine.

    Raises `Refused` for a name that is not known, and for options that this optimizer does not have.
    """
    refuse_unknown("optimizer", settings.optimizer, OPTIMIZERS)
    betas = {} if settings.betas is None else {"betas": settings.betas}
    groups = decay_groups(model, settings.weight_decay)
    if settings.optimizer == "muon":
        groups, betas = _for_muon(model, groups, betas), {}
    try:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[settings.optimizer](
            groups, lr=settings.lr, state=_state(settings), **betas
        )
    except (TypeError, ValueError, DiskError) as error:
        raise Refused(f"optimizer {settings.optimizer}: {error}") from error
    return SteppedByEngine(model, optimizer, asynchronous=not settings.sync)


def _state(settings: Settings) -> StateOption:
    if settings.disk is None:
        return settings.optimizer_state
    kind = cast("StateKind", settings.optimizer_state)
    return Disk(*map(str, settings.disk), kind=kind)


def launch(optimizer: SteppedByEngine, settings: Settings, step: int) -> float | None:
    """Launch the update of step number `step`; after a call that has stepped, do nothing.

    Return the norm of the gradients before they are clipped; unless `sync`, of those of the step before. None if
    it is not known: before there was a step, and if each layer is stepped in the call.

    The update raises `Diverged`, and changes no weight, if gradients are not finite, which is possible with a
    finite loss.
    """
    problem = f"the gradients must stay finite, but are not at step {step}; try a lower {settings.names.lr}"
    norm = None
    if not settings.step_in_backward:
        norm = optimizer.clip_at_next_step(settings.clip or math.inf, error=Diverged(problem))
    optimizer.step()
    # With `sync` it is filled in by now.
    return None if norm is None else norm.item()


def set_rate(optimizer: SteppedByEngine, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def decay_groups(model: RoundPipe, weight_decay: float) -> list[dict[str, Any]]:
    """Divide master weights into those with decay and those without: norms, biases and all other vectors.

    >>> from torch import nn
    >>> from roundpipe import Runtime
    >>> with Runtime("cpu:1") as runtime:
    ...     model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), runtime=runtime)
    ...     [(len(group["params"]), group["weight_decay"]) for group in decay_groups(model, 0.1)]
    [(1, 0.1), (3, 0.0)]
    """
    norms = {id(weight) for module in model.modules() if _is_norm(module) for weight in module.parameters()}
    own = dict(model.named_model.named_parameters())
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, master in model.optim_named_parameters():
        plain = master.ndim < 2 or name.endswith("bias") or id(own[name]) in norms
        (others if plain else decayed).append(master)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _for_muon(model: RoundPipe, groups: list[dict[str, Any]], adamw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divide groups into hidden matrices and the rest, which AdamW updates with the options `adamw`."""
    divided = optim.muon_groups(model.named_model, model.optim_named_parameters())
    hidden = {id(master) for group in divided if group["use_muon"] for master in group["params"]}
    result: list[dict[str, Any]] = []
    for group in groups:
        matrices = [master for master in group["params"] if id(master) in hidden]
        others = [master for master in group["params"] if id(master) not in hidden]
        result.append({**group, "params": matrices, "use_muon": True})
        result.append({**group, **adamw, "params": others, "use_muon": False})
    return [group for group in result if group["params"]]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())
