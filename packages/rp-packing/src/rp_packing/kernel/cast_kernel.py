"""Cast matrices to FP8 by rows, by columns or both at once, in Triton kernels; needs Triton at import."""

# Triton compiles the kernels' source, to which Python's types do not apply; it has no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rp_packing.rows import CARRY, EXPONENTS

# The numbers of a program, and its warps.
_TILE_ROWS, _TILE_COLUMNS = 128, 64
_WARPS = 8
_CARRY = tl.constexpr(CARRY)
_INFINITY = tl.constexpr(0x7F800000)


def largest(
    numbers: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    of_rows: Tensor | None,
    of_columns: Tensor | None,
) -> None:
    """Raise `of_rows` and `of_columns`, zeros before, to the bits of the largest sizes, on the current stream.

    Shapes:
        numbers: (rows, columns), bfloat16, contiguous. of_rows: (rows), int32. of_columns: (columns), int32.
        by_row: (rows), fp32, what multiplies numbers before those of columns are compared. by_column: (columns),
        fp32, the same for rows.
    """
    rows, columns = numbers.shape
    tiles_along = triton.cdiv(columns, _TILE_COLUMNS)
    programs = triton.cdiv(rows, _TILE_ROWS) * tiles_along
    with torch.cuda.device_of(numbers):
        largest_kernel[(programs,)](
            numbers,
            by_row,
            by_column,
            of_rows,
            of_columns,
            rows,
            columns,
            tiles_along,
            tile_rows=_TILE_ROWS,
            tile_columns=_TILE_COLUMNS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def cast(
    numbers: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    of_rows: Tensor | None,
    of_columns: Tensor | None,
    rows_out: tuple[Tensor, Tensor] | None,
    turned_out: tuple[Tensor, Tensor | None] | None,
) -> None:
    """Write codes and scales, on the current stream.

    Shapes: as of `largest`, and
        rows_out: codes, (rows, columns), and scales, (rows, 1), by the largest of rows.
        turned_out: codes, (columns, at least rows), with zeros beyond, and scales, (columns, 1), by the largest of
        columns; without scales: the codes of `rows_out`.
    """
    rows, columns = numbers.shape
    codes, scales = rows_out or (None, None)
    turned, turned_scales = turned_out or (None, None)
    padded = rows if turned is None else turned.shape[1]
    tiles_along = triton.cdiv(columns, _TILE_COLUMNS)
    programs = triton.cdiv(padded, _TILE_ROWS) * tiles_along
    with torch.cuda.device_of(numbers):
        cast_kernel[(programs,)](
            numbers,
            by_row,
            by_column,
            of_rows,
            of_columns,
            codes,
            scales,
            turned,
            turned_scales,
            rows,
            columns,
            padded,
            tiles_along,
            exponent=0 if codes is None else EXPONENTS[codes.dtype],
            turned_exponent=0 if turned is None else EXPONENTS[turned.dtype],
            tile_rows=_TILE_ROWS,
            tile_columns=_TILE_COLUMNS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


@triton.jit
def largest_kernel(
    numbers,
    by_row,
    by_column,
    of_rows,
    of_columns,
    rows,
    columns,
    tiles_along,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row, column = _places(tiles_along, tile_rows, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(numbers + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    if of_rows is not None:
        sizes = _size_bits(_by_column(number, by_column, column, columns))
        tl.atomic_max(of_rows + row, tl.max(sizes, 1), mask=row < rows, sem="relaxed")
    if of_columns is not None:
        sizes = _size_bits(_by_row(number, by_row, row, rows))
        tl.atomic_max(of_columns + column, tl.max(sizes, 0), mask=column < columns, sem="relaxed")


@triton.jit
def cast_kernel(
    numbers,
    by_row,
    by_column,
    of_rows,
    of_columns,
    codes,
    scales,
    turned,
    turned_scales,
    rows,
    columns,
    padded,
    tiles_along,
    exponent: tl.constexpr,
    turned_exponent: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row, column = _places(tiles_along, tile_rows, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(numbers + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    if codes is not None:
        scale, inverse = _scale(tl.load(of_rows + row, mask=row < rows, other=0), exponent)
        code = (_by_column(number, by_column, column, columns) * inverse[:, None]).to(codes.dtype.element_ty)
        tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
        if tl.program_id(0) % tiles_along == 0:
            tl.store(scales + row, scale, mask=row < rows)
    if turned is not None:
        if turned_scales is not None:
            scale, inverse = _scale(tl.load(of_columns + column, mask=column < columns, other=0), turned_exponent)
            number = _by_row(number, by_row, row, rows) * inverse[None, :]
            # Where there is no row, an infinite column has not a NaN but a zero.
            code = tl.where((row < rows)[:, None], number, 0.0).to(turned.dtype.element_ty)
            if tl.program_id(0) // tiles_along == 0:
                tl.store(turned_scales + column, scale, mask=column < columns)
        there = (column < columns)[:, None] & (row < padded)[None, :]
        tl.store(turned + column[:, None] * padded + row[None, :], tl.trans(code), mask=there)


@triton.jit
def _places(tiles_along, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Return the rows and columns of a program's tile. Matrices may have more than 2^31 numbers: 64 bits."""
    program = tl.program_id(0)
    row = (program // tiles_along).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = (program % tiles_along).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    return row, column


@triton.jit
def _by_column(number, factors, column, columns):
    """Return the numbers in fp32, multiplied and rounded as bfloat16's product is."""
    wide = number.to(tl.float32)
    if factors is not None:
        factor = tl.load(factors + column, mask=column < columns, other=0.0)
        wide = (wide * factor[None, :]).to(number.dtype).to(tl.float32)
    return wide


@triton.jit
def _by_row(number, factors, row, rows):
    wide = number.to(tl.float32)
    if factors is not None:
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        wide = (wide * factor[:, None]).to(number.dtype).to(tl.float32)
    return wide


@triton.jit
def _size_bits(wide):
    """Return sizes as integers, which are ordered as they are; those of NaN are above infinity's."""
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest_bits, exponent: tl.constexpr):
    """Return the least power of two by which a largest size fits, and its inverse: as `rows` has them."""
    exponents = tl.maximum(((largest_bits + _CARRY) >> 23) - exponent, 1)
    is_finite = largest_bits < _INFINITY
    scale = tl.where(is_finite, (exponents << 23).to(tl.float32, bitcast=True), float("nan"))
    inverse = tl.where(is_finite, ((254 - exponents) << 23).to(tl.float32, bitcast=True), float("nan"))
    return scale, inverse
