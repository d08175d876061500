"""Adapt TRL's fused head so that a row of layers can run it."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_FLAG = "fused_lm_head"


def bind_fused_head(model: nn.Module) -> None:
    """Rebind TRL's fused head, so that copies of a model run it on their own modules.

    TRL replaces `forward` on the model object by a function that computes log-probabilities if it is called with
    ``fused_lm_head=True``. Otherwise it calls the original forward, which is bound to this object. A row of layers
    runs copies of the modules around the layers. So after this, calls without the flag run the forward of the
    copy's class.

    A model without such a head does not change. The head of a model with adapters is on the model inside.
    """
    for module in model.modules():
        _bind(module)


def refuse_wrapped(engine: nn.Module, model: nn.Module, argument: str) -> None:
    """Raise `ValueError` if a model got its fused head after it was wrapped: the layers of `engine` lack the head.

    `model`: the user's own. `argument`: the trainer's argument that was the wrapped model.
    """
    if any(_head_of(module) is not None for module in (engine, *model.modules())):
        raise ValueError(
            f"{argument} was wrapped before this trainer gave it the head that computes log-probabilities, which "
            "its layers lack; pass the model itself, and options of wrapping as roundpipe=RoundPipeOptions(...)"
        )


def _head_of(model: nn.Module) -> FunctionType | None:
    replaced = vars(model).get("forward")
    function = replaced.__func__ if isinstance(replaced, MethodType) else None
    is_head = isinstance(function, FunctionType) and _FLAG in function.__code__.co_varnames
    return function if is_head else None


def _bind(model: nn.Module) -> None:
    fused = _head_of(model)
    if fused is None:
        return

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    vars(model)["forward"] = MethodType(forward, model)
