"""Adapt TRL's fused head so that a row of layers can run it."""

from __future__ import annotations

import functools
from types import MethodType
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


def _bind(model: nn.Module) -> None:
    replaced = vars(model).get("forward")
    if not isinstance(replaced, MethodType) or _FLAG not in replaced.__func__.__code__.co_varnames:
        return
    fused = replaced.__func__

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    vars(model)["forward"] = MethodType(forward, model)
