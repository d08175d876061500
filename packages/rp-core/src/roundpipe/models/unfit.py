"""Modules that cannot be wrapped, and why: copies on devices would not be what they are."""

from __future__ import annotations

import torch
from rp_engine.wrapping import named_modules
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from roundpipe.models.adapters import refuse_adapters
from roundpipe.models.calls.surroundings import odd
from roundpipe.models.wrapped.overlapping import refuse_overlapping

# By name, since importing FSDP takes long.
_REPLICATING = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})


def refuse_unfit(model: nn.Module) -> None:
    """Raise `TypeError` or `ValueError` for a module or tensor that devices cannot have.

    >>> refuse_unfit(nn.Sequential(nn.LazyLinear(2)))
    Traceback (most recent call last):
    ValueError: '0' (LazyLinear) has a parameter 'weight' without a shape, which its first call decides; ...
    """
    for name, module in named_modules(model):
        where = f"{name or 'the model'!r} ({type(module).__name__})"
        _refuse_module(where, module)
        refuse_adapters(module)
        for own, tensor in module.named_parameters(recurse=False):
            _refuse_tensor(where, f"parameter {own!r}", tensor)
        for own, tensor in module.named_buffers(recurse=False):
            _refuse_tensor(where, f"buffer {own!r}", tensor)
    refuse_overlapping(model)


def _refuse_module(where: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{where} was made by torch.jit.script or torch.jit.trace, which cannot be copied to devices with "
            "other weights; wrap the module that it was made from, with compile_layers=True to compile it"
        )
    if type(module).__name__ in _REPLICATING and type(module).__module__.startswith("torch."):
        raise TypeError(
            f"{where} is torch's, which would replicate or replace what devices read; wrap the module in it: one "
            "process drives all GPUs of a machine, and torchrun with a process a machine joins machines "
            "(docs/machines.md)"
        )
    table: dict[int, object] = vars(module)["_forward_pre_hooks"]
    for hook in table.values():
        if isinstance(hook, WeightNorm):
            raise TypeError(
                f"{where} has the old torch.nn.utils.weight_norm, whose hook computes {hook.name!r} in each "
                "forward and leaves it on the module; use torch.nn.utils.parametrizations.weight_norm instead"
            )
        if isinstance(hook, BasePruningMethod):
            raise TypeError(
                f"{where} is pruned by a hook, which computes a weight anew in each forward and leaves it on the "
                "module; make pruning permanent with torch.nn.utils.prune.remove, or use a parametrization"
            )


def _refuse_tensor(where: str, what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{where} has a {what} without a shape, which its first call decides; run one batch through the model "
            "before wrapping it"
        )
    if (kind := odd(tensor)) is not None and not tensor.is_meta:
        raise ValueError(
            f"{where} has a {what} that is a {kind[0]}, but weights must be dense and of an ordinary dtype "
            f"(torch.strided); {kind[1]}"
        )
