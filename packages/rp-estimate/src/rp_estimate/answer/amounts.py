"""Amounts as people read them: bytes, seconds, parameters."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """Format a number of things.

    >>> counted(1, "sequence"), counted(2, "sequence")
    ('1 sequence', '2 sequences')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def rounded(number: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def seconds(ms: float) -> str:
    """Format milliseconds as seconds."""
    return f"{rounded(ms / 1e3)} s" if ms >= 1 else "less than 1 ms"


def gb(nbytes: int) -> str:
    """Format bytes with their unit.

    >>> gb(12_340_000_000)
    '12.3 GB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.0f} {unit}" if nbytes >= 100 * size else f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def billion(count: int) -> str:
    """Format a number of parameters."""
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.3g} million"
