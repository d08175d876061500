"""Casts of what a linear layer multiplies: by kernels on CUDA devices, elsewhere by operations of torch."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NamedTuple

import torch

from rp_packing.kernel.launching import DeviceKernel, is_for_kernels, launched
from rp_packing.products.scaled import MULTIPLE, padded, transposed
from rp_packing.rows import Rows, cast_columns, cast_rows

_ThreeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_CASTS = DeviceKernel("numbers are cast to FP8")
_CODES = torch.float8_e4m3fn


class GradientCodes(NamedTuple):
    """An output's gradients in FP8, (rows, out), for the products that need them, each with its folded scales.

    `for_input`: (rows, out). `for_weight`: (out, rows), with zeros up to a multiple of 16 rows.
    """

    for_input: Rows | None
    for_weight: Rows | None


def cast_input(numbers: torch.Tensor, *, turned: bool) -> tuple[Rows, torch.Tensor | None]:
    """Cast a layer's input, (rows, in), by rows; `turned`: return the codes' transpose, too, (in, rows), padded.

    >>> rows, turned = cast_input(torch.ones(3, 2, dtype=torch.bfloat16), turned=True)
    >>> rows.codes.shape, turned.shape
    (torch.Size([3, 2]), torch.Size([2, 16]))

    Codes and scales are the same bits as those of `cast_rows`. Compiled on a CUDA device, the largest number of
    each row is found by what makes the numbers.
    """
    if torch.compiler.is_compiling() and numbers.is_cuda:
        codes, scales, other = _input_operation(numbers, numbers.detach().abs().amax(-1), turned)
    elif is_for_kernels(numbers):
        codes, scales, other = _cast_input(numbers, None, turned)
    else:
        codes, scales, other = _input_by_torch(numbers, turned)
    return Rows(codes, scales), other if turned else None


def cast_gradient(
    grad: torch.Tensor,
    of_weight: torch.Tensor | None,
    of_input: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> GradientCodes:
    """Cast an output's gradients, (rows, out), by rows and by columns.

    Args:
        grad: bfloat16.
        of_weight: the weight's scales, (out, 1), which multiply the gradients before they are cast by rows; None:
            they are not.
        of_input: the input's scales, (rows, 1), the same for the cast by columns.
        dtypes: of both.
    """
    if torch.compiler.is_compiling() and grad.is_cuda:
        found = _gradient_operation(grad, of_weight, of_input, *dtypes)
    elif is_for_kernels(grad) and not torch.is_grad_enabled():
        # With ``create_graph=True`` they are differentiated: what kernels write would be taken for constants.
        found = _cast_gradient(grad, of_weight, of_input, *dtypes)
    else:
        found = _gradient_by_torch(grad, of_weight, of_input, *dtypes)
    codes, scales, turned, turned_scales = found
    return GradientCodes(
        None if of_weight is None else Rows(codes, scales),
        None if of_input is None else Rows(turned, turned_scales),
    )


# By torch's operations


def _input_by_torch(numbers: torch.Tensor, turned: bool) -> _ThreeTensors:
    rows = cast_rows(numbers)
    return rows.codes, rows.scales, transposed(rows.codes).codes if turned else _nothing(numbers)


def _gradient_by_torch(
    grad: torch.Tensor,
    of_weight: torch.Tensor | None,
    of_input: torch.Tensor | None,
    rows_dtype: torch.dtype,
    columns_dtype: torch.dtype,
) -> _Tensors:
    codes = scales = turned = turned_scales = _nothing(grad)
    if of_weight is not None:
        codes, scales = cast_rows(grad * of_weight.t().to(grad.dtype), rows_dtype)
    if of_input is not None:
        by_columns, turned_scales = cast_columns(grad * of_input.to(grad.dtype), columns_dtype)
        turned = padded(by_columns)
    return codes, scales, turned, turned_scales


def _nothing(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.float32)


# By the kernels


def _cast_input(numbers: torch.Tensor, largest: torch.Tensor | None, turned: bool) -> _ThreeTensors:
    numbers = numbers.contiguous()
    codes, scales, other = _input_outs(numbers, turned)
    run = partial(_launch_input, numbers, largest, (codes, scales), other if turned else None)
    if _runs(run, numbers, "input", largest is None, turned):
        return codes, scales, other
    return _input_by_torch(numbers, turned)


def _launch_input(
    numbers: torch.Tensor,
    largest: torch.Tensor | None,
    rows: tuple[torch.Tensor, torch.Tensor],
    turned: torch.Tensor | None,
) -> None:
    kernels = _kernels()
    if largest is None:
        bits = torch.zeros(numbers.shape[0], dtype=torch.int32, device=numbers.device)
        kernels.largest(numbers, None, None, bits, None)
    else:
        bits = largest.float().view(torch.int32)
    kernels.cast(numbers, None, None, bits, None, rows, None if turned is None else (turned, None))


def _cast_gradient(
    grad: torch.Tensor,
    of_weight: torch.Tensor | None,
    of_input: torch.Tensor | None,
    rows_dtype: torch.dtype,
    columns_dtype: torch.dtype,
) -> _Tensors:
    grad = grad.contiguous()
    found = _gradient_outs(grad, of_weight, of_input, rows_dtype, columns_dtype)
    variant = ("gradient", of_weight is None, of_input is None, rows_dtype, columns_dtype)
    if _runs(partial(_launch_gradient, grad, of_weight, of_input, found), grad, *variant):
        return found
    return _gradient_by_torch(grad, of_weight, of_input, rows_dtype, columns_dtype)


def _launch_gradient(
    grad: torch.Tensor, of_weight: torch.Tensor | None, of_input: torch.Tensor | None, found: _Tensors
) -> None:
    kernels, (num_rows, num_columns) = _kernels(), grad.shape
    bits = torch.zeros(num_rows + num_columns, dtype=torch.int32, device=grad.device)
    of_rows = None if of_weight is None else bits[:num_rows]
    of_columns = None if of_input is None else bits[num_rows:]
    kernels.largest(grad, of_input, of_weight, of_rows, of_columns)
    rows = None if of_weight is None else found[:2]
    turned = None if of_input is None else found[2:]
    kernels.cast(grad, of_input, of_weight, of_rows, of_columns, rows, turned)


def _runs(launch: Any, numbers: torch.Tensor, *variant: object) -> bool:
    # Triton compiles for whether sizes are 1, divisible by 16, or above 2^31.
    sizes = tuple((size == 1, size % 16 == 0, size > 1 << 31) for size in numbers.shape)
    return launched((_CASTS, numbers.device, (*variant, sizes, numbers.data_ptr() % 16)), launch)


def _kernels() -> Any:
    # Torch installs Triton only on Linux.
    return importlib.import_module("rp_packing.kernel.cast_kernel")


def _input_outs(numbers: torch.Tensor, turned: bool) -> _ThreeTensors:
    num_rows, num_columns = numbers.shape
    codes = numbers.new_empty(num_rows, num_columns, dtype=_CODES)
    scales = numbers.new_empty(num_rows, 1, dtype=torch.float32)
    if not turned:
        return codes, scales, _nothing(numbers)
    return codes, scales, numbers.new_empty(num_columns, _padded(num_rows), dtype=_CODES)


def _gradient_outs(
    grad: torch.Tensor,
    of_weight: torch.Tensor | None,
    of_input: torch.Tensor | None,
    rows_dtype: torch.dtype,
    columns_dtype: torch.dtype,
) -> _Tensors:
    num_rows, num_columns = grad.shape
    rows = turned = (_nothing(grad), _nothing(grad))
    if of_weight is not None:
        codes = grad.new_empty(num_rows, num_columns, dtype=rows_dtype)
        rows = (codes, grad.new_empty(num_rows, 1, dtype=torch.float32))
    if of_input is not None:
        codes = grad.new_empty(num_columns, _padded(num_rows), dtype=columns_dtype)
        turned = (codes, grad.new_empty(num_columns, 1, dtype=torch.float32))
    return *rows, *turned


def _padded(num_rows: int) -> int:
    return num_rows + -num_rows % MULTIPLE


def _fake_input(numbers: torch.Tensor, largest: torch.Tensor | None, turned: bool) -> _ThreeTensors:
    del largest
    return _input_outs(numbers, turned)


# One operation each for torch's compiler, which finds casts of the same numbers and computes them once.
_input_operation: Any = torch.library.custom_op(  # pyright: ignore[reportUnknownMemberType]
    "rp_packing::cast_input",
    _cast_input,
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor numbers, Tensor? largest, bool turned) -> (Tensor, Tensor, Tensor)",
)
_gradient_operation: Any = torch.library.custom_op(  # pyright: ignore[reportUnknownMemberType]
    "rp_packing::cast_gradient",
    _cast_gradient,
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor? of_weight, Tensor? of_input, ScalarType rows_dtype, ScalarType columns_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_input_operation.register_fake(_fake_input)
_gradient_operation.register_fake(_gradient_outs)
