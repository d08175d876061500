"""The product of two matrices in FP8, by the GPU's own instructions or, elsewhere, with the same codes in fp32."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch.nn import functional

from rp_packing.rows import Rows

# What rows and columns must be multiples of.
MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


def product(left: Rows, right: Rows, dtype: torch.dtype, *, fast_sums: bool = False) -> torch.Tensor:
    """Return ``left @ right.T`` of two matrices in FP8 with scales by row: (m, k), (n, k) to (m, n) in `dtype`.

    >>> from rp_packing.rows import cast_rows
    >>> one = cast_rows(torch.ones(16, 32))
    >>> product(one, one, torch.bfloat16)[0, 0].item()
    32.0

    On CUDA devices by torch's scaled product, which needs `k` and `n` to be multiples of 16 and `dtype` to be
    bfloat16. Sums are fp32; `fast_sums` lets Hopper keep fewer bits of them. Elsewhere the codes are multiplied
    in fp32.
    """
    if left.codes.device.type != "cuda":
        return _emulated(left, right).to(dtype)
    scaled: Any = torch._scaled_mm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - the public one is new in torch 2.10
    found = scaled(
        left.codes,
        right.codes.t(),
        scale_a=left.scales,
        scale_b=right.scales.t(),
        out_dtype=dtype,
        use_fast_accum=fast_sums,
    )
    return cast("torch.Tensor", found)


def _emulated(left: Rows, right: Rows) -> torch.Tensor:
    # Autocast would multiply in 16 bits.
    with torch.autocast(left.codes.device.type, enabled=False):
        return left.codes.float() @ right.codes.float().t() * left.scales * right.scales.t()


def transposed(codes: torch.Tensor) -> Rows:
    """Return the codes' transpose, with scales of one: what a product along the other dimension reads.

    The number of columns becomes a multiple of 16, with zeros.

    >>> transposed(torch.zeros(3, 2, dtype=torch.float8_e4m3fn)).codes.shape
    torch.Size([2, 16])
    """
    turned = codes.t().contiguous()
    return Rows(padded(turned), ones(turned))


def ones(codes: torch.Tensor) -> torch.Tensor:
    """Return scales of one: (rows, 1), fp32.

    >>> ones(torch.zeros(2, 3, dtype=torch.float8_e4m3fn)).tolist()
    [[1.0], [1.0]]
    """
    return torch.ones(codes.shape[0], 1, dtype=torch.float32, device=codes.device)


def padded(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes with zeros up to a number of columns that is a multiple of 16.

    >>> padded(torch.ones(2, 17).to(torch.float8_e5m2)).shape
    torch.Size([2, 32])
    """
    lacking = -codes.shape[1] % MULTIPLE
    if not lacking:
        return codes
    # A code of zero is the byte zero; torch pads no FP8 numbers.
    return functional.pad(codes.view(torch.uint8), (0, lacking)).view(codes.dtype)


@cache
def refusal(device: torch.device) -> str | None:
    """Return why a device computes no products in FP8, in words; None if it does.

    >>> refusal(torch.device("cpu")) is None
    True

    CPU devices do, in fp32, as tests need it. CUDA devices from Ada and Hopper on do.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"products in FP8 run on NVIDIA GPUs, but {device} is none"
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        return (
            f"products in FP8 need compute capability 8.9 (Ada) or more, but {torch.cuda.get_device_name(device)} "
            f"has {found[0]}.{found[1]}"
        )
    return None
