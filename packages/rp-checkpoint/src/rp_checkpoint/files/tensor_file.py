"""Write and read files in the safetensors format piece by piece.

The library of that name writes a file only from tensors that are all in memory, and holds the GIL meanwhile.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rp_optim import Deferred

from rp_checkpoint.errors import CheckpointDamaged, CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Longer headers are refused, as by the library.
_MOST_HEADER_BYTES = 100_000_000
# Bytes that are cast, copied, hashed or read at a time.
STRIDE_BYTES = 1 << 25
# The number of elements in a sample: they are on one or two pages of a mapped file.
_SAMPLED = 256


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write. `read`: returns it, in this shape and any dtype; called when it is written.

    `read_part`: if given, returns the elements [start, stop) only, flat, in `dtype`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    read_part: Callable[[int, int], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield its bytes in order, as 1-dim uint8 tensors, each valid until the next."""
        if self.read_part is not None:
            yield from self._parts(self.read_part)
            return
        flat = self.read().detach().reshape(-1)
        if flat.dtype != self.dtype:
            flat = flat.resolve_conj()
        count = max(STRIDE_BYTES // self.dtype.itemsize, 1)
        for start in range(0, flat.numel(), count):
            yield flat[start : start + count].to(self.dtype).contiguous().view(torch.uint8)

    def _parts(self, read: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        size, count = math.prod(self.shape), max(STRIDE_BYTES // self.dtype.itemsize, 1)
        for start in range(0, size, count):
            yield read(start, min(start + count, size)).contiguous().view(torch.uint8)


def source_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSource:
    """Return the source that writes this tensor, cast to `dtype` if that is given.

    >>> source = source_of("w", torch.ones(3), torch.bfloat16)
    >>> source.nbytes, [len(piece) for piece in source.pieces()]
    (6, [6])
    """
    return TensorSource(name, dtype or tensor.dtype, tuple(tensor.shape), lambda: tensor)


def deferred_source(name: str, tensor: Deferred) -> TensorSource:
    """Return the source that reads this tensor part by part while it is written."""
    return TensorSource(name, tensor.dtype, tensor.shape, tensor.read, tensor.read_part)


def sources_of_converted(
    results: Mapping[str, torch.Tensor], convert: Callable[[], Mapping[str, torch.Tensor]]
) -> list[TensorSource]:
    """Return sources that are converted together when the first is read; reading the last frees the memory.

    `results`: what `convert` returns, by name, on the meta device.

    >>> one, two = sources_of_converted(meta := {"a": torch.zeros(2), "b": torch.zeros(3)}, lambda: meta)
    >>> one.name, two.read()
    ('a', tensor([0., 0., 0.]))
    """
    converted: dict[str, torch.Tensor] = {}
    left = set(results)

    def read(name: str) -> torch.Tensor:
        if not converted:
            converted.update(convert())
        left.discard(name)
        result = converted[name]
        if not left:
            converted.clear()
        return result

    return [
        TensorSource(name, meta.dtype, tuple(meta.shape), partial(read, name)) for name, meta in results.items()
    ]


def header(sources: Sequence[TensorSource], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file: the bytes before those of the tensors.

    Raises `CheckpointError` for a dtype that the format lacks.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for source in sources:
        if source.dtype not in _NAMES:
            raise CheckpointError(f"{source.name} has dtype {source.dtype}, which safetensors cannot hold")
        place = [offset, offset + source.nbytes]
        entries[source.name] = {"dtype": _NAMES[source.dtype], "shape": source.shape, "data_offsets": place}
        offset += source.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: `offset` in bytes from the file's beginning."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Return a new tensor with its values."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(tensor)
        return tensor

    def deferred(self) -> Deferred:
        """Return this tensor, to be read later. Reading raises `CheckpointError` if the file cannot be read."""
        return Deferred(self.dtype, self.shape, self._read_part)

    def _read_part(self, start: int, stop: int) -> torch.Tensor:
        part = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        if stop > start:
            with _opened(self.path) as file:
                _fill(file.fileno(), part, self.offset + start * self.dtype.itemsize, self.path)
        return part

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the offset of each part, in elements, and its values, flat, in this dtype.

        Raises `CheckpointError` if the file cannot be read.
        """
        size, count = math.prod(self.shape), max(STRIDE_BYTES // self.dtype.itemsize, 1)
        with _opened(self.path) as file:
            for start in range(0, size, count):
                part = torch.empty(min(count, size - start), dtype=self.dtype, device="cpu")
                _fill(file.fileno(), part, self.offset + start * self.dtype.itemsize, self.path)
                yield start, part.to(dtype)

    def read_into(self, target: torch.Tensor, *, only_changes: bool = False) -> None:
        """Read it into a tensor of its shape, in strides; cast if the dtypes differ.

        With `only_changes`, equal strides are not written, so that pages of a mapped file stay shared with it.

        Raises `CheckpointError` if the file cannot be read.
        """
        goal = target.detach()
        whole = goal.view(-1) if goal.is_contiguous() else torch.empty(self.shape, dtype=goal.dtype).view(-1)
        direct = whole.dtype == self.dtype and not only_changes
        count = max(STRIDE_BYTES // self.dtype.itemsize, 1)
        with _opened(self.path) as file:
            for start in range(0, whole.numel(), count):
                part = whole[start : start + count]
                there = part if direct else torch.empty(part.shape, dtype=self.dtype)
                _fill(file.fileno(), there, self.offset + start * self.dtype.itemsize, self.path)
                if not direct and not (only_changes and torch.equal(part, there.to(part.dtype))):
                    part.copy_(there)
        if not goal.is_contiguous():
            goal.copy_(whole.view(self.shape))


def catalogue(path: Path) -> dict[str, Stored]:
    """Return the tensors in a file, by name.

    Raises `CheckpointDamaged` if it is not a safetensors file, `CheckpointError` if it cannot be read.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
            raise CheckpointDamaged(f"{path} is no safetensors file: its header has an impossible length")
        text = file.read(length)
    try:
        entries = cast("dict[str, dict[str, Any]]", json.loads(text))
        entries.pop("__metadata__", None)
        return {name: _stored(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} is no safetensors file: its header cannot be read ({error!r})") from error


def _stored(path: Path, begin: int, entry: Mapping[str, Any]) -> Stored:
    return Stored(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + entry["data_offsets"][0])


def _opened(path: Path) -> Any:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _fill(file: int, target: torch.Tensor, offset: int, path: Path) -> None:
    view = memory_of(target)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not count:
            raise CheckpointDamaged(f"{path} ends before its last tensor does")
        done += count


def sample(tensor: torch.Tensor) -> int:
    """Return a checksum of the first elements, to recognize tensors that are not saved.

    >>> sample(torch.ones(9000)) == sample(torch.ones(9001)), sample(torch.ones(2)) == sample(torch.zeros(2))
    (True, False)
    """
    first = tensor.detach().reshape(-1)[:_SAMPLED].contiguous().view(torch.uint8)
    return zlib.crc32(memory_of(first))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor, which must outlive it.

    >>> tensor = torch.full((2,), 65, dtype=torch.int8)
    >>> bytes(memory_of(tensor))
    b'AA'
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
