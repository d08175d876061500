"""A backend of `torch.compile` whose kernels C++ code launches, without the GIL."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_LOG = logging.getLogger(__name__)


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
