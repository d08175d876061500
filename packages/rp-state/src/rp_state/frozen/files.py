"""Files of frozen weights, our own without names and those of checkpoints, read by the threads of their disk."""

from __future__ import annotations

import os
from functools import partial

from rp_optim import DiskError
from rp_optim.disk.file import Contents, NamedFile, WorkingFile, open_file
from rp_optim.disk.memory import empty_memory
from rp_optim.disk.system import System
from rp_optim.disk.threads import TransferThreads
from rp_optim.disk.volume import STRIPE_BYTES, THREADS, Transfer

FROZEN_WEIGHTS = Contents("frozen weights", "pack them (roundpipe.pack_frozen)")
_ADVICE = "nothing was lost, so make the call again once it answers, or wrap the model with another directory"


class FrozenFile:
    """A file of frozen weights in a directory, written once and then only read.

    `stall_s`: seconds without an answer after which a read fails with `DiskStalled`.
    """

    def __init__(self, file: WorkingFile, threads: TransferThreads, stall_s: float) -> None:
        self._file = file
        self._threads = threads
        self._stall_s = stall_s
        self._stamp: tuple[int, int] | None = None

    @classmethod
    def new(cls, directory: str, system: System, stall_s: float) -> FrozenFile:
        """Open an empty file in a directory. Raises `DiskError` if it cannot be."""
        return cls(open_file(directory, system, FROZEN_WEIGHTS), TransferThreads(THREADS), stall_s)

    def of_checkpoint(self, path: str, descriptor: int, system: System) -> FrozenFile:
        """Return a file that others have made, on the same disk."""
        found = FrozenFile(_Existing(path, descriptor, system), self._threads, self._stall_s)
        found.note_complete()
        return found

    @property
    def directory(self) -> str:
        """Where it is."""
        return self._file.directory

    @property
    def descriptor(self) -> int:
        """The system's number of the open file."""
        return self._file.descriptor

    @property
    def alignment(self) -> int:
        """What addresses, offsets and sizes of transfers must be multiples of."""
        return self._file.alignment

    def reserve(self, nbytes: int, start: int) -> None:
        """Reserve space. Raises `DiskFull` if there is not enough."""
        self._file.reserve(nbytes, start)

    def note_complete(self) -> None:
        """Remember when a file that others can write was last written, so that a later change is noticed."""
        if isinstance(self._file, NamedFile | _Existing):
            self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        told = os.fstat(self.descriptor)
        return told.st_mtime_ns, told.st_size

    def write(self, offset: int, memory: memoryview) -> Transfer:
        """Begin to write the memory, which must not change until that is done."""
        jobs = [
            partial(self._file.write_any, memory[start : start + STRIPE_BYTES], offset + start)
            for start in range(0, len(memory), STRIPE_BYTES)
        ]
        return self._started(jobs)

    def read(self, offset: int, memory: memoryview, needed: int) -> Transfer:
        """Begin to fill the memory from `offset` on; `needed`: so many bytes of it suffice, at the file's end."""
        jobs = [
            partial(
                self._read, memory[start : start + STRIPE_BYTES], offset + start, min(needed - start, STRIPE_BYTES)
            )
            for start in range(0, needed, STRIPE_BYTES)
        ]
        return self._started(jobs)

    def _read(self, memory: memoryview, offset: int, needed: int) -> None:
        if self._stamp is not None and self._stamp != self._now():
            raise DiskError(
                f"the file of frozen weights in {self._file.directory} was changed since the model was wrapped; "
                "wrap it again. (Weights in it cannot be written in place: where the file system has no files "
                "without names, keep them in memory for that.)"
            )
        self._file.read_any(memory, offset, needed)

    def _started(self, jobs: list[partial[None]]) -> Transfer:
        parts = [(self._threads.submit(job), self._file.directory, self._threads) for job in jobs]
        return Transfer(tuple(parts), self._stall_s, _ADVICE)


class _Existing(WorkingFile):
    """A file of a checkpoint: never written."""

    def __init__(self, path: str, descriptor: int, system: System) -> None:
        super().__init__(path, descriptor, system, FROZEN_WEIGHTS)

    def _try_out(self, nbytes: int) -> None:
        self._system.read(self.descriptor, memoryview(empty_memory(nbytes)), 0)
