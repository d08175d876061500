"""Write tensors to files on separate threads, through a buffer of limited size."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from rp_optim.jobs import Outcome, Worker, wait_for_all

from rp_checkpoint.files.manifest import Checksum, digest
from rp_checkpoint.files.tensor_file import STRIDE_BYTES, TensorSource, header, memory_of

_LOG = logging.getLogger(__name__)
_THREADS = 4
# A disk that takes longer than this for a stride is logged.
_LONG_S = 30.0


class _OneFile:
    """A file that is being written: its descriptor, and the checksum of each stride."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.nbytes = 0
        self.strides: dict[int, str] = {}
        self.is_open = True

    def write(self, content: memoryview, offset: int) -> None:
        """Write a stride, and note its checksum."""
        self.strides[offset] = digest(content)
        done = 0
        while done < len(content):
            done += os.pwrite(self.descriptor, content[done:], offset + done)

    def close(self, *, sync: bool) -> None:
        """Close the file, after forcing it to the disk if `sync`."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            if sync:
                os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)

    def checksum(self) -> Checksum:
        """Return the checksum of all strides."""
        return Checksum(self.nbytes, tuple(self.strides[offset] for offset in sorted(self.strides)))


class FileWriter:
    """Copies tensors into a buffer, from which its threads write files.

    `buffer_bytes`: the largest size of the buffer. `waited_s`: seconds that `write` has waited for the disk,
    because the buffer was full. `nbytes`: bytes written so far.

    >>> from tempfile import TemporaryDirectory
    >>> from rp_checkpoint.files.tensor_file import source_of
    >>> with TemporaryDirectory() as folder:
    ...     writer = FileWriter(Path(folder), buffer_bytes=1 << 20)
    ...     writer.write("a.safetensors", [source_of("w", torch.ones(2))], {})
    ...     sums = writer.finish()
    >>> list(sums), writer.nbytes
    (['a.safetensors'], 88)
    """

    def __init__(self, folder: Path, buffer_bytes: int) -> None:
        self._folder = folder
        self._stride_bytes = STRIDE_BYTES
        self._most = max(buffer_bytes // self._stride_bytes, 2)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._num_buffers = 0
        self._workers = [Worker(f"roundpipe-checkpoint-{index}") for index in range(_THREADS)]
        self._files: dict[str, _OneFile] = {}
        self._writes: list[Outcome[None]] = []
        self._error: BaseException | None = None
        self.waited_s = 0.0
        self.nbytes = 0

    def start(self) -> None:
        """Start the threads, before the thread that waits for them: at exit, those started later end first."""
        for worker in self._workers:
            worker.submit(_nothing)

    def write(self, name: str, sources: Sequence[TensorSource], metadata: Mapping[str, str]) -> None:
        """Copy these tensors to the buffer for a new file. They may change when this returns.

        Raises the first error of the writing threads.
        """
        file = self._files[name] = _OneFile(self._folder / name)
        stride = _Stride(self._buffer)
        begin = torch.frombuffer(bytearray(header(sources, metadata)), dtype=torch.uint8)
        for piece in chain(self._cut(begin), *(source.pieces() for source in sources)):
            for full in stride.take(piece):
                self._send(file, full, full.numel())
        rest, length = stride.rest()
        if rest is not None:
            self._send(file, rest, length)

    def _cut(self, content: torch.Tensor) -> list[torch.Tensor]:
        return [content[at : at + self._stride_bytes] for at in range(0, content.numel(), self._stride_bytes)]

    def _buffer(self) -> torch.Tensor:
        """Return an empty buffer; wait for one if all are full."""
        self.raise_error()
        try:
            return self._free.get_nowait()
        except Empty:
            pass
        if self._num_buffers < self._most:
            self._num_buffers += 1
            return torch.empty(self._stride_bytes, dtype=torch.uint8, device="cpu")
        begun = time.perf_counter()
        try:
            return self._next_free()
        finally:
            self.waited_s += time.perf_counter() - begun

    def _next_free(self) -> torch.Tensor:
        while True:
            try:
                return self._free.get(timeout=_LONG_S)
            except Empty:
                _LOG.warning(
                    "the checkpoint in %s: the disk has accepted no data for %.0f s; the next step waits for it",
                    *(self._folder, _LONG_S),
                )

    def _send(self, file: _OneFile, buffer: torch.Tensor, length: int) -> None:
        offset = file.nbytes
        file.nbytes += length
        self.nbytes += length
        worker = self._workers[offset // self._stride_bytes % _THREADS]
        self._writes.append(worker.submit(self._write, file, buffer, length, offset))

    def _write(self, file: _OneFile, buffer: torch.Tensor, length: int, offset: int) -> None:
        try:
            if self._error is None:
                file.write(memory_of(buffer)[:length], offset)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._free.put(buffer)

    def raise_error(self) -> None:
        """Raise the first error of the writing threads, if there was one."""
        if self._error is not None:
            raise self._error

    def finish(self) -> dict[str, Checksum]:
        """Wait until all is on the disk; return the checksums by the files' names.

        Raises the first error of the writing threads; files are closed in any case.
        """
        wait_for_all(self._writes)
        for file in self._files.values():
            worker = self._workers[0]
            self._writes.append(worker.submit(self._close, file))
        wait_for_all(self._writes)
        self._writes.clear()
        for worker in self._workers:
            worker.close()
        self.raise_error()
        return {name: file.checksum() for name, file in self._files.items()}

    def _close(self, file: _OneFile) -> None:
        try:
            file.close(sync=self._error is None)
        except BaseException as error:
            self._error = self._error or error


class _Stride:
    """A buffer that is filled piece by piece."""

    def __init__(self, buffer: Callable[[], torch.Tensor]) -> None:
        self._new = buffer
        self._buffer: torch.Tensor | None = None
        self._filled: int = 0

    def take(self, piece: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy a piece into the buffer; yield each buffer that becomes full."""
        while piece.numel():
            if self._buffer is None:
                self._buffer = self._new()
            room = self._buffer.numel() - self._filled
            part = piece[:room]
            self._buffer[self._filled : self._filled + part.numel()].copy_(part)
            self._filled += part.numel()
            piece = piece[room:]
            if self._filled == self._buffer.numel():
                full, self._buffer, self._filled = self._buffer, None, 0
                yield full

    def rest(self) -> tuple[torch.Tensor | None, int]:
        """Return the last buffer, and the number of bytes in it."""
        return self._buffer, self._filled


def _nothing() -> None:
    pass
