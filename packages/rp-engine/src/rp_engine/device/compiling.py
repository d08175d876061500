"""Compilation of twins, the replicas of layers on a device, with `torch.compile`.

The compiler caches by a layer's code and guards, not by module. So all layers of one kind share one compilation
for each device and each mode, such as training and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from rp_transfer.cuda.inductor import launched_from_cpp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace as symbolic_trace

CompileOptions = Mapping[str, Any]


_Body = TypeVar("_Body", bound=Callable[..., Any])


def compiled_parts(layer: nn.Module) -> Sequence[str]:
    """Return the names of a layer's submodules that may be compiled; the layer's own is empty."""
    return getattr(layer, "compiled_submodules", [""])


class Eager:
    """Leaves all twins of a model as they are."""

    compiles: bool = False

    def raise_limits(self) -> None:
        """Prepare the calling thread for layers that run for the first time."""

    def compile(self, twin: nn.Module) -> None:
        """Make a twin run as all others do."""

    def compiled(self, body: _Body) -> _Body:
        """Return a function that runs as twins do."""
        return body


EAGER = Eager()


class LayerCompiler(Eager):
    """Compiles all twins of a model with the same options.

    Args:
        options: arguments of `torch.compile`, such as ``{"mode": "max-autotune-no-cudagraphs"}``.
        num_devices: multiplies the compiler's recompile limits, since each device needs its own variants.
    """

    compiles: bool = True

    def __init__(self, options: CompileOptions, num_devices: int) -> None:
        self._options = dict(options)
        self._num_devices = num_devices
        _keep_device_guard()
        _call_while_others_trace()
        if self._options.get("backend", launched_from_cpp) in (launched_from_cpp, "inductor"):
            _trace_identity()

    def raise_limits(self) -> None:
        """Raise torch's recompile limits for the calling thread and the jobs that it submits."""
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - where torch documents its limits
        for name, one_device in _LIMITS.items():
            setattr(config, name, max(getattr(config, name), one_device * self._num_devices))

    def compile(self, twin: nn.Module) -> None:
        """Compile a twin, or the submodules that it names; torch compiles them in their first call.

        A layer names submodules in an attribute ``compiled_submodules`` if the code around them differs from layer
        to layer.
        """
        # Its own name is empty.
        names = compiled_parts(twin)
        for part in map(twin.get_submodule, names):
            part.compile(**self._options)  # pyright: ignore[reportUnknownMemberType] - torch leaves its types open

    def compiled(self, body: _Body) -> _Body:
        """Compile a function of the modules it is given, with a variant for each of their shapes."""
        # A variant for any shape would be slower, and layers have none.
        options: Any = {"dynamic": False, **self._options}
        return cast(_Body, torch.compile(body, **options))


def compiler_of(compile_layers: object, num_devices: int) -> Eager:
    """Return what compiles twins for a `compile_layers` setting.

    >>> compiler_of(False, 1).compiles, compiler_of({"dynamic": False}, 1).compiles
    (False, True)

    `True` stands for `launched_from_cpp` as the backend. Raises `TypeError` for anything but a bool or a dict.
    """
    if compile_layers is False:
        return EAGER
    return LayerCompiler(_options_of(compile_layers), num_devices)


def _options_of(compile_layers: object) -> CompileOptions:
    if compile_layers is True:
        return {"backend": launched_from_cpp}
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
    # Torch 2.11 has one flag in the process that says that FX is tracing, which each compilation sets. Meanwhile,
    # another device's thread could not call a compiled layer: torch would take it for traced code.
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - as in `LayerCompiler.raise_limits`
        config.force_compile_during_fx_trace = True


def _trace_identity() -> None:
    # The compiler traces the identity by FX when it first needs it. Meanwhile FX takes all modules that are
    # called, also on other threads, for parts of what it traces: a layer of another device would fail.
    from torch._inductor import loop_body

    loop_body.InterpreterShim._dummy_gm()  # pyright: ignore[reportPrivateUsage] - nothing else asks for it


# Torch's defaults: variants of one function, and variants in all, after which it runs uncompiled.
_LIMITS = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
