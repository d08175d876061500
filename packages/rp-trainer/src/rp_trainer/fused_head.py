"""TRL's fused head, in the form in which a row of layers can run it."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

_FLAG = "fused_lm_head"


def bind_fused_head(model: nn.Module) -> None:
    """Let copies of a model run the fused head of TRL on their own modules.

    TRL replaces `forward` on the model itself by a function that computes log-probabilities if it is called with
    ``fused_lm_head=True``, and otherwise calls the forward it has replaced, which is bound to this very model. A
    row of layers runs copies of the modules around the layers, so without the flag they call their class's.

    It does nothing for a model without such a head. That of an adapted model is on the model inside.
    """
    for module in model.modules():
        _bind(module)


def _bind(model: nn.Module) -> None:
    found = vars(model).get("forward")
    if not isinstance(found, MethodType) or _FLAG not in found.__func__.__code__.co_varnames:
        return
    fused = found.__func__

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    vars(model)["forward"] = MethodType(forward, model)
