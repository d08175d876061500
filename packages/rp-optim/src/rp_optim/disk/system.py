"""The calls that files of working state make to the operating system; tests replace them to let each one fail."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
# Offsets in `struct statx` of linux/stat.h: which fields are set, and the two alignments in bytes.
_MASK_AT, _MEMORY_AT, _OFFSET_AT, _STATX_BYTES = 0, 152, 156, 256

# What file systems need that do not tell: the page, a multiple of every disk's sector.
PAGE = 4096


def direct_alignment(descriptor: int) -> int:
    """Return the alignment in bytes, of addresses and offsets, for O_DIRECT; 0 if the file cannot be read so.

    `STATX_DIOALIGN` of Linux 6.1 tells; where it does not, 4096.
    """
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return PAGE
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return PAGE
    if not _field(answer, _MASK_AT) & _STATX_DIOALIGN:
        return PAGE
    return max(_field(answer, _MEMORY_AT), _field(answer, _OFFSET_AT))


def _field(answer: ctypes.Array[ctypes.c_char], at: int) -> int:
    return int.from_bytes(answer.raw[at : at + 4], "little")


def _read(descriptor: int, memory: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [memory], offset)


def _write(descriptor: int, memory: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [memory], offset)


@dataclass(frozen=True, slots=True)
class System:
    """The calls: `open` a path with flags and a mode, `read` and `write` at an offset, `reserve` a range."""

    open: Callable[[str, int, int], int] = os.open
    read: Callable[[int, memoryview, int], int] = _read
    write: Callable[[int, memoryview, int], int] = _write
    reserve: Callable[[int, int, int], None] = os.posix_fallocate
    alignment: Callable[[int], int] = direct_alignment


SYSTEM = System()
