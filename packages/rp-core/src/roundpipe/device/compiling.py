"""Compiled layers: `torch.compile` on the layers as they are on each device.

The compiler's cache goes by a layer's code and by what it guards, not by the module: all layers of one kind share
a compilation, once for each device and for each mode, such as training and evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CompileOptions = Mapping[str, Any]


class Compiler:
    """Compiles twins with the same options.

    Args:
        options: arguments of `torch.compile`, such as ``{"mode": "max-autotune-no-cudagraphs"}``.
        num_devices: how many devices there are; the compiler keeps so many times as many variants of a kind of
            layer before it goes on without compiling.
    """

    def __init__(self, options: CompileOptions, num_devices: int) -> None:
        self._options = dict(options)
        self._num_devices = num_devices
        _keep_device_guard()

    def raise_limits(self) -> None:
        """Let the compiler keep that many variants in what the calling thread runs, or has others run."""
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - where torch documents its limits
        for name, one_device in _LIMITS.items():
            setattr(config, name, max(getattr(config, name), one_device * self._num_devices))

    def compile(self, twin: nn.Module) -> None:
        """Let calls of this module run compiled; that happens on the first of them."""
        twin.compile(**self._options)  # pyright: ignore[reportUnknownMemberType] - torch leaves its types open


def options_of(compile_layers: object) -> CompileOptions | None:
    """The options that `compile_layers` stands for; None if nothing is compiled.

    >>> options_of(True), options_of(False), options_of({"dynamic": False})
    ({}, None, {'dynamic': False})

    Raises `TypeError` for what is neither a bool nor a dict.
    """
    if isinstance(compile_layers, bool):
        return {} if compile_layers else None
    if not isinstance(compile_layers, Mapping):
        raise TypeError(
            f"compile_layers must be a bool or a dict of arguments of torch.compile, but is {compile_layers!r}"
        )
    return cast(CompileOptions, compile_layers)


def _keep_device_guard() -> None:
    # Without a GPU, the first thread to trace in torch 2.11 leaves the process a pointer into its own memory, and
    # tracing crashes once that thread has ended. So let it be the caller's, before a lane's.
    with FakeTensorMode():
        pass


# By default the compiler gives up on a function after so many variants, and after so many in all.
_LIMITS = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
