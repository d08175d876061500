"""Compilation of twins, the replicas of layers on a device, with `torch.compile`.

The compiler caches by a layer's code and guards, not by module. So all layers of one kind share one compilation
for each device and each mode, such as training and evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace as symbolic_trace

CompileOptions = Mapping[str, Any]


class Compiler:
    """Compiles all twins of a model with the same options.

    Args:
        options: arguments of `torch.compile`, such as ``{"mode": "max-autotune-no-cudagraphs"}``.
        num_devices: multiplies the compiler's recompile limits, since each device needs variants of its own.
    """

    def __init__(self, options: CompileOptions, num_devices: int) -> None:
        self._options = dict(options)
        self._num_devices = num_devices
        _keep_device_guard()
        _call_while_others_trace()

    def raise_limits(self) -> None:
        """Raise torch's recompile limits for the calling thread and the jobs that it submits."""
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - where torch documents its limits
        for name, one_device in _LIMITS.items():
            setattr(config, name, max(getattr(config, name), one_device * self._num_devices))

    def compile(self, twin: nn.Module) -> None:
        """Compile a twin, or those of its submodules that it names; torch does so in their first call.

        A layer may have an attribute ``compiled_submodules``, names of submodules, if the code around them differs
        from layer to layer.
        """
        names: Sequence[str] | None = getattr(twin, "compiled_submodules", None)
        for part in [twin] if names is None else map(twin.get_submodule, names):
            part.compile(**self._options)  # pyright: ignore[reportUnknownMemberType] - torch leaves its types open


def options_of(compile_layers: object) -> CompileOptions | None:
    """Arguments of `torch.compile` for a `compile_layers` setting; None if layers are not compiled.

    >>> options_of(True), options_of(False), options_of({"dynamic": False})
    ({}, None, {'dynamic': False})

    Raises `TypeError` for anything but a bool or a dict.
    """
    if isinstance(compile_layers, bool):
        return {} if compile_layers else None
    if not isinstance(compile_layers, Mapping):
        raise TypeError(
            f"compile_layers must be a bool or a dict of arguments of torch.compile, but is {compile_layers!r}"
        )
    return cast(CompileOptions, compile_layers)


def _keep_device_guard() -> None:
    # Without a GPU, torch 2.11 keeps a pointer into the memory of the first thread that traces; tracing crashes
    # once that thread has ended. So trace on the caller's thread before any device thread does.
    with FakeTensorMode():
        pass


def _call_while_others_trace() -> None:
    # Torch 2.11 notes for the whole process that FX is tracing, as each compilation does. A device's thread that
    # calls a compiled layer meanwhile would be refused as if it were being traced.
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - as in `Compiler.raise_limits`
        config.force_compile_during_fx_trace = True


# Torch's defaults: variants of one function, and variants in all, after which it runs uncompiled.
_LIMITS = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
