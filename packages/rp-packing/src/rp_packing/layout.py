"""The layout of a packed weight's codes and scales, and the meaning of a code, as a kernel needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Codes of 4 bits are indices of a table, two per byte, the first in the high or the low half. Codes of a byte are
# integers or E4M3 numbers.
Kind = Literal["first_high", "first_low", "int8", "e4m3"]


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Codes in lines: (matrices, lines, length), contiguous.

    `values`: the 16 values of 4-bit codes. `block`: the numbers of lines, and of codes of a line, that share a
    scale; None for all codes of a line. Each matrix begins with new blocks. Scales: (matrices, blocks of lines,
    blocks of a line), contiguous. `is_transposed`: the weight is (matrices, length, lines); otherwise it has the
    codes' layout.

    >>> CodeLayout("int8", matrices=1, lines=3, length=5, block=(1, None)).scales
    (1, 3, 1)
    """

    kind: Kind
    matrices: int
    lines: int
    length: int
    block: tuple[int, int | None]
    values: tuple[float, ...] = ()
    is_transposed: bool = False

    @property
    def scales(self) -> tuple[int, int, int]:
        """The shape of the scales."""
        block_lines, block_length = self.block
        along = 1 if block_length is None else -(-self.length // block_length)
        return self.matrices, -(-self.lines // block_lines), along

    @property
    def line_bytes(self) -> int:
        """Bytes of the codes of a line."""
        return -(-self.length // 2) if self.values else self.length
