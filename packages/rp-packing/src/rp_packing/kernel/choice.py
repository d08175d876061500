"""Choose how to expand a packed weight: by the kernel if it runs, otherwise by torch's operations."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from functools import partial

import torch

from rp_packing.errors import KernelWarning
from rp_packing.format import Format, table
from rp_packing.formats.int8 import Int8
from rp_packing.piecewise.threads import is_watched
from rp_packing.services import lent

# The properties for which Triton compiles a kernel: device, format, shape, dtype, and alignment of tensors.
_Variant = tuple[torch.device, Format, torch.Size, torch.dtype, tuple[int, ...]]
_ALIGNMENT = 16

# A variant's first launch compiles and loads it, which in Triton only one thread may do at a time. Later launches
# need no lock; they may block while a device's queue is full.
_FIRST = threading.Lock()
_launched: set[_Variant] = set()
# By device, why the kernel does not run there.
_refused: dict[torch.device, str] = {}


def expand_into(form: Format, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weight into `out`, which is contiguous, on the current stream of its device.

    On CUDA devices the kernel does it. Operations of torch do it on other devices, if tensors or a mode trace
    operations, and if the kernel does not run, for which there is one `KernelWarning`.
    """
    if not (_is_for_kernel(codes, scales, out) and _by_kernel(form, codes, scales, out)):
        form.expand(codes, scales, out)


def refusal(device: torch.device) -> str | None:
    """Try the kernel on a CUDA device; return why it does not run, or None if it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)
        try:
            codes = torch.zeros(1, _ALIGNMENT, dtype=torch.uint8, device=device)
            scales, out = torch.ones(1, device=device), torch.empty(1, _ALIGNMENT, device=device)
            _by_kernel(Int8(), codes, scales, out)
        except Exception as error:
            return repr(error)
    return _refused.get(codes.device)


def _is_for_kernel(*tensors: torch.Tensor) -> bool:
    return all(type(one) is torch.Tensor and one.is_cuda for one in tensors) and not is_watched()


def _by_kernel(form: Format, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> bool:
    """Launch the kernel; return whether it runs on this device."""
    if codes.device in _refused:
        return False
    codes, scales = codes.contiguous(), scales.contiguous()
    aligned = tuple(one.data_ptr() % _ALIGNMENT for one in (codes, scales, out))
    variant = (codes.device, form, out.shape, out.dtype, aligned)
    launch = partial(_launch, form, codes, scales, out)
    if variant in _launched:
        launch()
        return True
    reason = _first_launch(variant, launch)
    if reason is not None:
        warnings.warn(_explained(codes.device, reason), KernelWarning, stacklevel=2)
    return codes.device not in _refused


def _first_launch(variant: _Variant, launch: Callable[[], None]) -> str | None:
    """Launch a variant for the first time; return why it failed, unless that was returned before."""
    device = variant[0]
    with _FIRST:
        if device in _refused:
            return None
        try:
            launch()
        except Exception as error:
            # A device that is short of memory may have more when the task runs again.
            if lent().is_out_of_memory(error):
                raise
            reason = repr(error)
            is_new = reason not in _refused.values()
            _refused[device] = reason
            return reason if is_new else None
        _launched.add(variant)
        return None


def _launch(form: Format, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    # Torch installs Triton only on Linux.
    kernel = importlib.import_module("rp_packing.kernel.triton_kernel")
    layout = form.layout(out.shape)
    values = table(layout.values, 1, codes).view(-1) if layout.values else None
    kernel.expand(layout, codes, scales, values, out)


def _explained(device: torch.device, reason: str) -> str:
    return (
        f"packed weights are expanded by operations of torch on {device}, which takes several times as long: "
        f"Triton's kernel does not run there, {reason}; it needs Triton, which comes with torch on Linux, and at "
        "its first launch a C compiler (apt install gcc, or set CC) and a folder to write (TRITON_CACHE_DIR)"
    )
