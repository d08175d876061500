"""Write masters into the low-precision weights that devices read, and codes of these, each in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rp_optim.checks import is_plain
from rp_optim.errors import InvalidParameter
from rp_optim.halves.split_master import SplitMaster, is_split_master
from rp_optim.kernels.kernel import current_kernel, kernel_for
from rp_optim.kernels.updates import Spot, UpdateKernel


@torch.no_grad()
def write_weights(masters: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    """Write each master into its weight, rounded to the weight's dtype, like ``copy_`` for many tensors at once.

    Rounds to nearest, ties to even. For a `SplitMaster`, even one that was made whole, ties go away from zero. The
    upper half of a master in halves is copied, unless it is the weight itself.

    >>> weight = torch.empty(2, dtype=torch.bfloat16)
    >>> write_weights([torch.tensor([1.0, 1.001])], [weight])
    >>> weight
    tensor([1., 1.], dtype=torch.bfloat16)

    Shapes: each weight has its master's; any strides, but only contiguous tensors are fast.

    Raises `InvalidParameter` if the shapes or the numbers of tensors differ.
    """
    by_kernel: dict[UpdateKernel, list[Spot]] = {}
    for master, weight in _pairs(masters, weights):
        if is_split_master(master) and master.is_split:
            _write_halves(master, weight)
        elif _is_flat(master) and _is_flat(weight) and master.dtype.is_complex == weight.dtype.is_complex:
            spot = Spot(master, master, weight, 1.0, rounds_away=isinstance(master, SplitMaster))
            by_kernel.setdefault(kernel_for(spot), []).append(spot)
        else:
            weight.copy_(master)
    for kernel, spots in by_kernel.items():
        kernel.to_weight(spots)


@torch.no_grad()
def write_row_codes(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write a bf16 matrix in FP8 (E4M3): a code for each number, which times its row's scale is the number.

    A scale is the least power of two by which the row's largest number fits E4M3, but no less than 2^-126. Rounds
    to nearest, ties to even. A row with a NaN or an infinity has NaN for its scale and codes. All kernels write
    the same bits. One pass, which releases the GIL.

    >>> codes, scales = torch.empty(2, 2, dtype=torch.float8_e4m3fn), torch.empty(2, 1)
    >>> write_row_codes(torch.tensor([[1.0, -448.0], [3.0, 900.0]]).bfloat16(), codes, scales)
    >>> codes.float().tolist(), scales.flatten().tolist()
    ([[1.0, -448.0], [0.75, 224.0]], [1.0, 4.0])

    Shapes: `weight` (rows, columns) bf16, `codes` of its shape in float8_e4m3fn, `scales` (rows, 1) fp32; all
    contiguous and on the host.

    Raises `InvalidParameter` otherwise.
    """
    wanted = {"weight": torch.bfloat16, "codes": torch.float8_e4m3fn, "scales": torch.float32}
    for (name, dtype), tensor in zip(wanted.items(), (weight, codes, scales), strict=True):
        shape = (weight.shape[0], 1) if name == "scales" and weight.ndim else weight.shape
        if weight.ndim != 2 or tensor.dtype != dtype or tensor.shape != shape or not _is_flat(tensor):
            raise InvalidParameter(
                "write_row_codes needs a bf16 matrix, float8_e4m3fn codes of its shape and one fp32 scale a row, "
                f"contiguous and on the host, but its {name} are {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    current_kernel().code_rows(weight, codes, scales)


def _write_halves(master: SplitMaster, weight: torch.Tensor) -> None:
    upper = master.upper
    if weight.dtype == upper.dtype:
        if weight.data_ptr() != upper.data_ptr():
            weight.copy_(upper)
    else:
        weight.copy_(master.joined())


def _pairs(
    masters: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if [master.shape for master in masters] != [weight.shape for weight in weights]:
        raise InvalidParameter(
            f"write_weights needs one weight for each master, of its shape, but the {len(masters)} masters and "
            f"{len(weights)} weights differ in number or shape; allocate weights with torch.empty_like(master)"
        )
    return list(zip(masters, weights, strict=True))


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout == torch.strided and is_plain(tensor)
