"""Expand packed weights of any format in one Triton kernel; needs Triton at import."""

# Triton compiles the kernel's source, to which Python's types do not apply; it has no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rp_packing.layout import CodeLayout

# The lines that a program expands, and the codes of each; and the number of its warps.
_FLAT_TILE = (1, 8192)
_TILE = (64, 128)
_WARPS = 4


def expand(layout: CodeLayout, codes: Tensor, scales: Tensor, values: Tensor | None, out: Tensor) -> None:
    """Write ``values[code] * scale`` in fp32, rounded once, on the current stream; nothing else is allocated.

    Shapes:
        codes: uint8, contiguous, as `layout` says. scales: fp32, or uint8 for powers of two. values: (16), fp32,
        for codes of 4 bits, otherwise None. out: the weight, contiguous, of any floating-point dtype.
    """
    if not out.numel():
        return
    sizes, constants = settings(layout)
    programs = layout.matrices * sizes["tiles_down"] * sizes["tiles_along"]
    # Triton launches on the calling thread's device, which may be another one.
    with torch.cuda.device_of(codes):
        expand_kernel[(programs,)](
            codes,
            scales,
            values,
            out,
            **sizes,
            **constants,
            num_warps=_WARPS,
            # Newer versions warn if this is not set. There is no sum here, so nothing to fuse.
            enable_fp_fusion=False,
        )


def settings(layout: CodeLayout) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the kernel's arguments beside tensors: sizes, and constants that it is compiled for."""
    is_flat = layout.matrices == layout.lines == 1
    tile_lines, tile_length = _FLAT_TILE if is_flat else _TILE
    _, scale_lines, line_scales = layout.scales
    sizes = {
        "lines": layout.lines,
        "length": layout.length,
        "line_bytes": layout.line_bytes,
        "scale_lines": scale_lines,
        "line_scales": line_scales,
        "tiles_down": -(-layout.lines // tile_lines),
        "tiles_along": -(-layout.length // tile_length),
    }
    block_lines, block_length = layout.block
    constants = {
        "kind": layout.kind,
        "is_flat": is_flat,
        "is_transposed": layout.is_transposed,
        "tile_lines": tile_lines,
        "tile_length": tile_length,
        # A tile has scales for several groups of lines and blocks of a line, or one for all.
        "block_lines": block_lines,
        "some_lines": max(tile_lines // block_lines, 1),
        "is_line_a_block": block_length is None,
        "some_blocks": 1 if block_length is None else tile_length // block_length,
    }
    return sizes, constants


@triton.jit
def expand_kernel(
    codes,
    scales,
    values,
    out,
    lines,
    length,
    line_bytes,
    scale_lines,
    line_scales,
    tiles_down,
    tiles_along,
    kind: tl.constexpr,
    is_flat: tl.constexpr,
    is_transposed: tl.constexpr,
    tile_lines: tl.constexpr,
    tile_length: tl.constexpr,
    block_lines: tl.constexpr,
    some_lines: tl.constexpr,
    is_line_a_block: tl.constexpr,
    some_blocks: tl.constexpr,
):
    # One program for each tile. Weights may have more than 2^31 elements, so indices have 64 bits.
    program = tl.program_id(0)
    if is_flat:
        matrix = tl.zeros((), tl.int64)
        tile_line = matrix
        tile_place = program.to(tl.int64)
    else:
        matrix = (program // tiles_along // tiles_down).to(tl.int64)
        tile_line = (program // tiles_along % tiles_down).to(tl.int64)
        tile_place = (program % tiles_along).to(tl.int64)
    line = tile_line * tile_lines + tl.arange(0, tile_lines)
    place = tile_place * tile_length + tl.arange(0, tile_length)
    inside = (line < lines)[:, None] & (place < length)[None, :]

    scale_line = tile_line * tile_lines // block_lines + tl.arange(0, some_lines)
    scale_place = tl.arange(0, some_blocks).to(tl.int64)
    if not is_line_a_block:
        scale_place += tile_place * some_blocks
    scale = tl.load(
        scales + (matrix * scale_lines + scale_line)[:, None] * line_scales + scale_place[None, :],
        mask=(scale_line < scale_lines)[:, None] & (scale_place < line_scales)[None, :],
    )
    if scale.dtype == tl.uint8:
        scale = _power(scale)

    if values is None:
        byte = tl.load(codes + (matrix * lines + line)[:, None] * line_bytes + place[None, :], mask=inside)
        number = _whole(byte) if kind == "int8" else _e4m3(byte)
    else:
        half = tile_place * (tile_length // 2) + tl.arange(0, tile_length // 2)
        byte = tl.load(
            codes + (matrix * lines + line)[:, None] * line_bytes + half[None, :],
            mask=(line < lines)[:, None] & (half < line_bytes)[None, :],
            other=0,
        )
        number = _pairs(byte.reshape(tile_lines * tile_length // 2), values, kind)

    number = number.reshape(some_lines, tile_lines // some_lines, some_blocks, tile_length // some_blocks)
    number = (number * scale[:, None, :, None]).reshape(tile_lines, tile_length).to(out.dtype.element_ty)
    if is_transposed:
        at = (matrix * length + place)[:, None] * lines + line[None, :]
        tl.store(out + at, tl.trans(number), mask=tl.trans(inside))
    else:
        tl.store(out + (matrix * lines + line)[:, None] * length + place[None, :], number, mask=inside)


@triton.jit
def _pairs(byte, values, kind: tl.constexpr):
    """Look up the numbers of the two codes of each byte, in order."""
    table = tl.load(values + tl.arange(0, 16))
    wide = byte.to(tl.int32)
    high = tl.gather(table, wide >> 4, 0)
    low = tl.gather(table, wide & 15, 0)
    return tl.join(high, low) if kind == "first_high" else tl.join(low, high)


@triton.jit
def _whole(byte):
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3(byte):
    """Convert an E4M3 code to its number, by operations that all cards have."""
    # Sign, exponent and mantissa where fp32 has them; then exponents differ by 120, also of subnormal numbers.
    bits = (byte.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    # The largest exponent with the largest mantissa, which would be 480, is a NaN.
    return tl.where(tl.abs(number) == 480.0, float("nan"), number)


@triton.jit
def _power(byte):
    """Convert an E8M0 byte to its power of two: 0 is 2**-127, which is subnormal in fp32; 255 is a NaN."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)
