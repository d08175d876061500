"""Launches of Triton kernels: the first of each variant alone, and why a kernel does not run on a device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from rp_packing.errors import KernelWarning
from rp_packing.piecewise.threads import is_watched
from rp_packing.services import lent

# A variant's first launch compiles and loads it, which in Triton only one thread may do at a time. Later launches
# need no lock; they may block while a device's queue is full.
_FIRST = threading.Lock()


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """A kernel. `work`: what it does, in words, which operations of torch do where it does not run."""

    work: str


# What Triton compiles a kernel for: kernel, device, and whatever else its arguments are compiled for.
Variant = tuple[DeviceKernel, torch.device, Hashable]
_launched: set[Variant] = set()
# By kernel and device, why the kernel does not run there.
_refused: dict[tuple[DeviceKernel, torch.device], str] = {}


def is_for_kernels(*tensors: torch.Tensor) -> bool:
    """Return whether tensors are on a CUDA device, and nothing traces operations: neither classes nor a mode."""
    return all(type(one) is torch.Tensor and one.is_cuda for one in tensors) and not is_watched()


def refused(kernel: DeviceKernel, device: torch.device) -> str | None:
    """Return why a kernel was found not to run on a device, or None."""
    return _refused.get((kernel, device))


def launched(variant: Variant, launch: Callable[[], None]) -> bool:
    """Launch a variant of a kernel; return whether the kernel runs on its device.

    Warns once, by a `KernelWarning`, if it does not.
    """
    kernel, device, _ = variant
    if refused(kernel, device):
        return False
    if variant in _launched:
        launch()
        return True
    reason = _first_launch(variant, launch)
    if reason is not None:
        warnings.warn(_explained(kernel, device, reason), KernelWarning, stacklevel=3)
    return not refused(kernel, device)


def _first_launch(variant: Variant, launch: Callable[[], None]) -> str | None:
    """Launch a variant for the first time; return why it failed, unless that was returned before."""
    kernel, device, _ = variant
    with _FIRST:
        if refused(kernel, device):
            return None
        try:
            launch()
        except Exception as error:
            # A device that is short of memory may have more when the task runs again.
            if lent().is_out_of_memory(error):
                raise
            reason = repr(error)
            is_new = reason not in _refused.values()
            _refused[kernel, device] = reason
            return reason if is_new else None
        _launched.add(variant)
        return None


def _explained(kernel: DeviceKernel, device: torch.device, reason: str) -> str:
    return (
        f"{kernel.work} by operations of torch on {device}, which takes several times as long: "
        f"Triton's kernel does not run there, {reason}; it needs Triton, which comes with torch on Linux, and at "
        "its first launch a C compiler (apt install gcc, or set CC) and a folder to write (TRITON_CACHE_DIR)"
    )
