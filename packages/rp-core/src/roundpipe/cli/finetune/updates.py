"""The optimizer of a fine-tuning: groups of parameters, learning rates, clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from rp_optim import NonFiniteGradients
from torch import nn

from roundpipe import RoundPipe, optim
from roundpipe.cli.errors import Diverged
from roundpipe.cli.finetune.options import FineTuning
from roundpipe.cli.training.rates import learning_rate

_CLASSES: Mapping[str, Any] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "adafactor": optim.Adafactor,
    "lion": optim.Lion,
    # Learning rates and weight decay as for AdamW.
    "muon": partial(optim.Muon, adjust_lr_fn="match_rms_adamw"),
    "sgd": optim.SGD,
    "sgd-momentum": partial(optim.SGD, momentum=0.9),
}


class Updates:
    """Runs the steps of a model's optimizer. `steps`: the number in the whole training."""

    def __init__(self, model: RoundPipe, options: FineTuning, steps: int) -> None:
        self._options, self._steps = options, steps
        settings = {} if options.betas is None else {"betas": options.betas}
        groups = decay_groups(model, options.weight_decay)
        if options.optimizer == "muon":
            groups, settings = _for_muon(model, groups, settings), {}
        self.optimizer: torch.optim.Optimizer = _CLASSES[options.optimizer](
            groups, lr=options.lr, state=options.optimizer_state, **settings
        )
        self._parameters = [parameter for group in groups for parameter in group["params"]]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        options = self._options
        return learning_rate(
            step, steps=self._steps, highest=options.lr, warm_up=options.warm_up, schedule=options.schedule
        )

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step; nothing may be stepping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def update(self, step: int, rate: float) -> None:
        """Apply the gradients of a step; runs on the optimizer's thread.

        Raises `Diverged`, and changes no weight, if they are not finite, which is possible with a finite loss.
        """
        self.set_rate(rate)
        try:
            optim.clip_grad_norm_(self._parameters, self._options.clip or math.inf, error_if_nonfinite=True)
        except NonFiniteGradients:
            raise Diverged(
                f"the gradients must stay finite, but are not at step {step}; try a lower --lr"
            ) from None
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] - torch leaves the closure untyped
        self.optimizer.zero_grad()


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
