"""Hooks that transformers registers in a model's first call: register them before twins, which share them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def register_lazy_hooks(module: torch.nn.Module) -> None:
    """Register the hooks by which transformers collects outputs, in all Hugging Face models in this module.

    Transformers registers them in the first call that asks for such outputs, and notes it on the model. A twin
    would register them in the tables that all twins share, once for each twin, and every output would be collected
    as often. The package is not imported: it is there if the module is one of its models.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    register: Callable[[torch.nn.Module], None] = getattr(capturing, "maybe_install_capturing_hooks", _nothing)
    for model in _topmost(module):
        register(model)


def _nothing(model: torch.nn.Module) -> None:
    # No transformers, or one that collects in another way.
    del model


def _topmost(module: torch.nn.Module) -> list[torch.nn.Module]:
    if any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__):
        return [module]
    return [model for child in module.children() for model in _topmost(child)]
