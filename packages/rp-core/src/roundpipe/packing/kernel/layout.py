"""Where codes and scales of a packed weight are, and what a code means: all that a kernel needs of a format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Codes of 4 bits stand for values of a table, two a byte, the first in the high or the low half. Codes of a byte
# are whole numbers or E4M3's.
Kind = Literal["first_high", "first_low", "int8", "e4m3"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Codes in lines: (matrices, lines, length), contiguous.

    `values`: of codes of 4 bits, 16 of them. `block`: of so many lines and codes of a line, which share a scale;
    None for all codes of a line. Each matrix begins with new blocks. Scales: (matrices, blocks of lines, blocks of
    a line), contiguous. `is_transposed`: the weight is (matrices, length, lines), otherwise as its codes are.

    >>> Layout("int8", matrices=1, lines=3, length=5, block=(1, None)).scales
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
