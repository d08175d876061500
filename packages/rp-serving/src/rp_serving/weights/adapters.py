"""The weights of a model with adapters as those of a model without: merged into copies, module by module."""

# PEFT is known by the shape of its modules: it need not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rp_packing import PackedWeight
from torch import nn


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the model. `unit`: the module of PEFT that changes it, of which `own` is its name inside."""

    tensor: torch.Tensor
    unit: nn.Module | None = None
    own: str = ""


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside of a `PeftModel`; any other model as it is."""
    inside: Any = getattr(model, "get_base_model", None)
    found: Any = inside() if callable(inside) and hasattr(model, "peft_config") else model
    return found


def held_by(base: nn.Module, prefix: str = "") -> Iterator[tuple[str, Held]]:
    """Yield parameters and buffers that are saved, by their names without adapters; tied ones by each."""
    inner = _inside(base)
    if inner is not base:
        for own, tensor in inner.named_parameters(remove_duplicate=False):
            yield prefix + own, Held(tensor, base, own)
        return
    tensors = (*base.named_parameters(recurse=False), *base.named_buffers(recurse=False))
    for own, tensor in tensors:
        if own not in base._non_persistent_buffers_set:  # pyright: ignore[reportPrivateUsage] - no public one
            yield prefix + own, Held(tensor)
    # Not `named_children`, which has a module that two names share only once.
    for name, child in base._modules.items():  # pyright: ignore[reportPrivateUsage]
        if child is not None:
            yield from held_by(child, f"{prefix}{name}.")


@torch.no_grad()
def merged(unit: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights inside of a module of PEFT with the adapters' part, in fp32; the module stays as it is.

    PEFT merges into a copy in fp32. In place, and back again, it changed 30 % of a bf16 weight's elements.
    """
    copies: dict[int, Any] = {
        id(one): nn.Parameter(whole(one).to(torch.float32, copy=True), requires_grad=False)
        for one in unit.parameters()
    }
    twin: Any = copy.deepcopy(unit, copies)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        made = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        twin.merge(safe_merge=False)
        made = twin.get_base_layer()
    return {own: one.detach() for own, one in made.named_parameters(remove_duplicate=False)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor; of a packed weight the expanded one."""
    return tensor.expanded() if isinstance(tensor, PackedWeight) else tensor.detach()


def _inside(module: Any) -> Any:
    """Return the model's own module inside of one of PEFT."""
    if hasattr(module, "base_layer") and callable(getattr(module, "get_base_layer", None)):
        return module.get_base_layer()
    if hasattr(module, "original_module") and hasattr(module, "unload_and_optionally_merge_module"):
        return module.original_module
    return module
