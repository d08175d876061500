"""The least precise dtype in which a layer computes: what two runs of it may differ by on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Autocast(Protocol):
    """The autocast settings for one kind of device."""

    @property
    def device_type(self) -> str:
        """Its kind, as torch names it."""
        ...

    @property
    def enabled(self) -> bool:
        """Whether autocast is on."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What it casts to."""
        ...


def least_precise(
    module: torch.nn.Module, autocast: Sequence[Autocast], device_type: str, *, rounds_fp32: bool = False
) -> torch.dtype:
    """The least precise dtype of a layer's parameters and of the autocast that it runs under.

    fp32 counts as fp16 where products may round their inputs (TF32): on devices with `rounds_fp32` all of them if
    torch is told so, those of convolutions and recurrent layers by default.

    >>> least_precise(torch.nn.Linear(2, 2).bfloat16(), (), "cpu")
    torch.bfloat16
    """
    of_parameters = (one.dtype for one in module.parameters() if one.dtype.is_floating_point)
    of_autocast = (each.dtype for each in autocast if each.enabled and each.device_type == device_type)
    found = max((torch.float32, *of_parameters, *of_autocast), key=lambda dtype: torch.finfo(dtype).eps)
    if found != torch.float32 or not rounds_fp32:
        return found
    rounds = torch.backends.cuda.matmul.allow_tf32 or (torch.backends.cudnn.allow_tf32 and may_use_cudnn(module))
    return torch.float16 if rounds else found


def may_use_cudnn(module: torch.nn.Module) -> bool:
    """Return whether a module may convolve or be recurrent, for which TF32 has a setting of its own.

    >>> may_use_cudnn(torch.nn.Linear(2, 2)), may_use_cudnn(torch.nn.Conv1d(2, 2, 1))
    (False, True)
    """
    # Weights of convolutions have three dimensions or more, also where a function convolves.
    is_recurrent = any(isinstance(each, torch.nn.RNNBase) for each in module.modules())
    return is_recurrent or any(one.ndim > 2 for one in module.parameters())
