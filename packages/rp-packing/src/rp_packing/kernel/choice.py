"""Choose how to expand a packed weight: by the kernel if it runs, otherwise by torch's operations."""

from __future__ import annotations

import importlib
import warnings
from functools import partial

import torch

from rp_packing.errors import KernelWarning
from rp_packing.format import Format, table
from rp_packing.formats.int8 import Int8
from rp_packing.kernel.launching import DeviceKernel, is_for_kernels, launched, refused

_EXPANSION = DeviceKernel("packed weights are expanded")
_ALIGNMENT = 16


def expand_into(form: Format, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weight into `out`, which is contiguous, on the current stream of its device.

    On CUDA devices the kernel does it. Operations of torch do it on other devices, if tensors or a mode trace
    operations, and if the kernel does not run, for which there is one `KernelWarning`.
    """
    if not (is_for_kernels(codes, scales, out) and _by_kernel(form, codes, scales, out)):
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
    return refused(_EXPANSION, codes.device)


def _by_kernel(form: Format, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> bool:
    """Launch the kernel; return whether it runs on this device."""
    codes, scales = codes.contiguous(), scales.contiguous()
    aligned = tuple(one.data_ptr() % _ALIGNMENT for one in (codes, scales, out))
    # The properties for which Triton compiles it.
    variant = (form, out.shape, out.dtype, aligned)
    return launched((_EXPANSION, codes.device, variant), partial(_launch, form, codes, scales, out))


def _launch(form: Format, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    # Torch installs Triton only on Linux.
    kernel = importlib.import_module("rp_packing.kernel.triton_kernel")
    layout = form.layout(out.shape)
    values = table(layout.values, 1, codes).view(-1) if layout.values else None
    kernel.expand(layout, codes, scales, values, out)
