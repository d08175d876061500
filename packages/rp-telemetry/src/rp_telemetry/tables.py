"""Plain-text tables and human-readable numbers for reports."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns: the first flush left, the others flush right.

    >>> print(table(["what", "ms"], [["compute", "12.5"], ["idle", "3"]]))
    what     |   ms
    compute  | 12.5
    idle     |    3
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return " | ".join([f"{first} ", *others]).rstrip()


def readable_bytes(count: int) -> str:
    """Format a number of bytes in B, KiB, MiB or GiB.

    >>> readable_bytes(1536 * 1024)
    '1.5 MiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def readable_ms(seconds: float) -> str:
    """Format a time in ms with two decimals.

    >>> readable_ms(0.0125)
    '12.50'
    """
    return f"{seconds * 1e3:.2f}"
