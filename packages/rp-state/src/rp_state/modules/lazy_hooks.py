"""Register hooks that transformers would register in a model's first call before twins exist, which share them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

# How transformers marks a model whose hooks, and those of the models inside, are registered.
_FLAG = "_output_capturing_hooks_installed"


def register_lazy_hooks(module: torch.nn.Module) -> None:
    """Register the hooks with which transformers collects outputs, in all Hugging Face models in this module.

    Transformers registers them in the first call that requests such outputs, and sets a flag on the model. Each
    twin would register them again in the hook tables that all twins share, and every output would be collected as
    often. The package is not imported here: the module is one of its models only if it already is.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    register: Callable[[torch.nn.Module], None] = getattr(capturing, "maybe_install_capturing_hooks", _nothing)
    for model in _without_hooks(module):
        register(model)


def _nothing(model: torch.nn.Module) -> None:
    # Transformers is not imported, or collects outputs in another way.
    del model


def _without_hooks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost models in which no model has its hooks."""
    # Transformers registers hooks in all models inside of one, also in those that have theirs: a vision tower that
    # was called before its language model would collect everything twice.
    is_model = any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)
    if is_model and not any(getattr(one, _FLAG, False) for one in module.modules()):
        return [module]
    if getattr(module, _FLAG, False):
        return []
    return [model for child in module.children() for model in _without_hooks(child)]
