"""Compilation of twins, the replicas of layers on a device, with `torch.compile`.

The compiler caches by a layer's code and guards, not by module. So all layers of one kind share one compilation
for each device and each mode, such as training and evaluation.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace as symbolic_trace

_LOG = logging.getLogger(__name__)

CompileOptions = Mapping[str, Any]


_Body = TypeVar("_Body", bound=Callable[..., Any])


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


class Compiler(Eager):
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
        names: Sequence[str] = getattr(twin, "compiled_submodules", [""])
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
    return Compiler(_options_of(compile_layers), num_devices)


def _options_of(compile_layers: object) -> CompileOptions:
    if compile_layers is True:
        return {"backend": launched_from_cpp}
    if not isinstance(compile_layers, Mapping):
        raise TypeError(
            f"compile_layers must be a bool or a dict of arguments of torch.compile, but is {compile_layers!r}"
        )
    return cast(CompileOptions, compile_layers)


def launched_from_cpp(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a graph with inductor so that C++ code launches its kernels without the GIL.

    A backend of `torch.compile`. Kernels launched from Python take the GIL, for which the threads of all devices
    compete. Graphs on the CPU are compiled as usual. So are graphs for which inductor has no C++ code, with a
    warning.
    """
    inductor = _inductor()
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
        return inductor.compile_fx(graph, inputs)
    with _COMPILING, _any_processor(), inductor.config.patch(cpp_wrapper=True):
        return inductor.compile_fx(graph, inputs, inner_compile=_with_cpp)


def _with_cpp(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile a forward or a backward graph."""
    inductor = _inductor()
    # Compiling changes the graph.
    untouched = copy.deepcopy(graph)
    with _COMPILING, _any_processor():
        try:
            # Torch 2.11 and 2.12 compile backward when it first runs, by then without these settings.
            with inductor.config.patch(cpp_wrapper=True), inductor.config.patch(inductor.get_cpp_wrapper_config()):
                return inductor.compile_fx_inner(graph, inputs, **{**options, "cpp_wrapper": True})
        except Exception as error:
            _warn_of_python(f"{type(error).__name__}: {error}".splitlines()[0])
            with inductor.config.patch(cpp_wrapper=False):
                return inductor.compile_fx_inner(untouched, inputs, **{**options, "cpp_wrapper": False})


@contextmanager
def _any_processor() -> Generator[None]:
    """Have C++ that this thread compiles use no vector instructions.

    What launches a GPU's kernels has no use for them. To know which there are, torch compiles a program for each
    kind and starts Python to load it, in a process's first compilation.
    """
    _ask_of_vectors_by_thread()
    before = getattr(_THREAD, "uses_no_vectors", False)
    _THREAD.uses_no_vectors = True
    try:
        yield
    finally:
        _THREAD.uses_no_vectors = before


@cache
def _ask_of_vectors_by_thread() -> None:
    # Torch has no setting for it.
    from torch._inductor import codecache, cpu_vec_isa

    usual = cpu_vec_isa.pick_vec_isa

    def pick_vec_isa() -> cpu_vec_isa.VecISA:
        return cpu_vec_isa.invalid_vec_isa if getattr(_THREAD, "uses_no_vectors", False) else usual()

    # What writes code and what compiles it must agree.
    modules: tuple[Any, ...] = (codecache, cpu_vec_isa)
    for module in modules:
        module.pick_vec_isa = pick_vec_isa


_THREAD = threading.local()


@cache
def _warn_of_python(reason: str) -> None:
    # Once for each reason: every kind of layer has several graphs.
    _LOG.warning(
        "torch.compile made no C++ code that launches a layer's kernels, so threads of several devices wait for "
        "each other more often; compile_layers={} compiles as usual and says nothing. The reason: %s",
        reason,
    )


# Settings that are patched belong to the whole process before torch 2.12, and backward graphs are compiled on the
# threads of their devices.
_COMPILING = threading.RLock()


def _inductor() -> Any:
    # Any: torch leaves the types of its compiler open. Imported late, since it takes a second.
    from torch._inductor import compile_fx

    return compile_fx


def _keep_device_guard() -> None:
    # Without a GPU, torch 2.11 keeps a pointer into the memory of the first thread that traces; tracing crashes
    # once that thread has ended. So trace on the caller's thread before any device thread does.
    with FakeTensorMode():
        pass


def _call_while_others_trace() -> None:
    # Torch 2.11 has one flag in the process that says that FX is tracing, which each compilation sets. Meanwhile,
    # another device's thread could not call a compiled layer: torch would take it for traced code.
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - as in `Compiler.raise_limits`
        config.force_compile_during_fx_trace = True


# Torch's defaults: variants of one function, and variants in all, after which it runs uncompiled.
_LIMITS = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
