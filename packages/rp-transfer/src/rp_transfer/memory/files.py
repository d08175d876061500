"""Memory-mapped files: copy tensors out of them, and release the pages that were read."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.overrides import TorchFunctionMode

from rp_transfer.memory.pages import PAGE_BYTES

_MAPS, _PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
# In bytes: how much of a file is read before its pages are released.
PIECE_BYTES = 1 << 24
# Bits of an entry of the pagemap, from admin-guide/mm/pagemap.rst of Linux; the sign is "present".
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61


class FileRange(NamedTuple):
    """Addresses ``[start, end)`` that are a private mapping of a file from `offset` bytes on."""

    start: int
    end: int
    offset: int
    inode: int
    path: str


class MappedFiles:
    """The address ranges of this process that are private mappings of files, as safetensors makes them.

    A page that was read counts as resident memory of the process until it is released; the next read loads it from
    the file again. A page that was written belongs to the process alone and is never released. On systems without
    Linux's ``/proc`` no mapping is found, and the system alone decides what stays resident.

    >>> MappedFiles.now().holds(torch.ones(3))
    False
    """

    def __init__(self, ranges: Iterable[FileRange]) -> None:
        self._ranges = [FileRange(0, 0, 0, 0, ""), *sorted(ranges)]

    @classmethod
    def now(cls) -> MappedFiles:
        """Look up the current mappings."""
        is_known = os.access(_MAPS, os.R_OK) and os.access(_PAGEMAP, os.R_OK)
        return cls(_private_files(_MAPS.read_text().splitlines()) if is_known else ())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether all bytes of a contiguous host tensor are in a mapped file."""
        return tensor.nbytes > 0 and self.covers(tensor.data_ptr(), tensor.nbytes)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Release the pages of a host tensor's storage if it lies in a mapped file. The values do not change."""
        storage = tensor.untyped_storage()
        self.give_back_range(storage.data_ptr(), storage.nbytes())

    def give_back_range(self, address: int, nbytes: int) -> None:
        """Release the whole pages in ``[address, address + nbytes)`` if that range lies in a mapped file."""
        if self.covers(address, nbytes):
            for start in range(address, address + nbytes, PIECE_BYTES):
                _release_pages(start, min(start + PIECE_BYTES, address + nbytes))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy like ``destination.copy_(source)``, with at most one piece of a mapped source resident."""
        if not (self.holds(source) and source.is_contiguous() and destination.is_contiguous()):
            destination.copy_(source)
            self.give_back(source)
            return
        into, out_of = destination.view(-1), source.view(-1)
        step = PIECE_BYTES // source.element_size()
        for start in range(0, len(out_of), step):
            piece = out_of[start : start + step]
            into[start : start + step].copy_(piece)
            self.give_back_range(piece.data_ptr(), piece.nbytes)

    def covers(self, address: int, nbytes: int) -> bool:
        """Return whether ``[address, address + nbytes)`` is in one mapped file."""
        return self.range_of(address, nbytes) is not None

    def range_of(self, address: int, nbytes: int) -> FileRange | None:
        """Return the mapping that ``[address, address + nbytes)`` is in; None if it is in none."""
        found = self._ranges[bisect_right(self._ranges, address, key=itemgetter(0)) - 1]
        return found if found.start <= address and address + nbytes <= found.end else None


class GivingBack(TorchFunctionMode):
    """While this mode is on, the thread's torch functions release the pages of mapped files that they read.

    A function that returns a view has read nothing. Large tensors are cast piece by piece.

    >>> with GivingBack():
    ...     torch.ones(2).to(torch.bfloat16)
    tensor([1., 1.], dtype=torch.bfloat16)
    """

    def __init__(self) -> None:
        super().__init__()
        # Addresses and sizes, since tensors would keep their memory alive. If another mapping takes their place,
        # releasing its unwritten pages is harmless.
        self._read: list[tuple[int, int]] = []
        self._nbytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and note the storages that it read."""
        kwargs = kwargs or {}
        if func is torch.Tensor.to and (dtype := _cast_to(args, kwargs)) is not None:
            return self._cast(args[0], dtype)
        result = func(*args, **kwargs)
        made = {_storage(tensor) for tensor in _host_tensors(result)}
        read = {_storage(tensor) for tensor in _host_tensors((args, tuple(kwargs.values())))}
        if made:
            self._note(read - made)
        return result

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        """Release the pages that were read since the last release."""
        super().__exit__(exc_type, exc_val, exc_tb)  # pyright: ignore[reportUnknownMemberType]
        self._flush()

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        files = MappedFiles.now()
        if not files.holds(tensor):
            return tensor.to(dtype)
        result = torch.empty_like(tensor, dtype=dtype)
        files.copy(result, tensor.detach())
        return result

    def _note(self, read: Iterable[tuple[int, int]]) -> None:
        self._read += read
        self._nbytes += sum(nbytes for _, nbytes in read)
        if self._nbytes >= PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        files = MappedFiles.now()
        for address, nbytes in self._read:
            files.give_back_range(address, nbytes)
        self._read, self._nbytes = [], 0


def _private_files(lines: Iterable[str]) -> Iterator[FileRange]:
    """Yield the private file mappings in the lines of /proc/self/maps."""
    for line in lines:
        addresses, permissions, offset, _, inode, *path = line.split(maxsplit=5)
        if permissions.endswith("p") and inode != "0":
            start, _, end = addresses.partition("-")
            yield FileRange(int(start, 16), int(end, 16), int(offset, 16), int(inode), "".join(path))


def is_written(address: int, nbytes: int) -> bool:
    """Return whether this process has written a page of ``[address, address + nbytes)``, a private mapping.

    >>> ones = torch.ones(1 << 20)
    >>> is_written(ones.data_ptr(), ones.nbytes)
    True
    """
    return _is_written(address // PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES))


def _release_pages(start: int, end: int) -> None:
    first, last = -(-start // PAGE_BYTES), end // PAGE_BYTES
    if first < last and not _is_written(first, last):
        # If the system refuses, as for locked memory, the pages stay resident.
        nbytes = (last - first) * PAGE_BYTES
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first * PAGE_BYTES), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def _is_written(first: int, last: int) -> bool:
    """Return whether the process wrote any of these pages (by number): releasing it would lose the values."""
    with _PAGEMAP.open("rb", buffering=0) as pagemap:
        entries = bytearray(os.pread(pagemap.fileno(), (last - first) * 8, first * 8))
    flags = torch.frombuffer(entries, dtype=torch.int64)
    is_own = (flags < 0) & ((flags & _OF_FILE) == 0) | ((flags & _SWAPPED) != 0)
    return len(flags) < last - first or bool(is_own.any())


def _host_tensors(tree: object) -> Iterator[torch.Tensor]:
    """Yield the plain host tensors in a tensor or in nested lists and tuples."""
    if isinstance(tree, list | tuple):
        for part in cast("list[object]", tree):
            yield from _host_tensors(part)
    elif isinstance(tree, torch.Tensor) and _is_plain(tree):
        yield tree


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _cast_to(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype if these arguments of ``tensor.to`` cast a large host tensor as transformers does."""
    if len(args) != 1 or not kwargs.keys() <= {"dtype", "device"}:
        return None
    tensor, dtype = next(_host_tensors(args), None), kwargs.get("dtype")
    is_kept = (
        tensor is None or dtype in (None, tensor.dtype) or tensor.nbytes < PIECE_BYTES or tensor.requires_grad
    )
    return None if is_kept or torch.device(kwargs.get("device") or "cpu").type != "cpu" else dtype
