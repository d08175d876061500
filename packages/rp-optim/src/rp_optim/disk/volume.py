"""A volume: one range of bytes, striped over a file in each of several directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rp_optim.disk.file import WorkingFile, open_file
from rp_optim.disk.system import SYSTEM, System
from rp_optim.disk.threads import TransferThreads
from rp_optim.disk.watch import DiskWork, watched
from rp_optim.errors import DiskStalled
from rp_optim.jobs import Outcome

# Bytes of one transfer. Smaller ones do not reach an NVMe disk's rate; of larger ones too few are under way.
STRIPE_BYTES = 8 << 20
# Transfers under way in each directory.
THREADS = 4
STALL_S = 120.0
# A stall is looked for so often. A look that came this much late shows that this process was stopped meanwhile.
_LOOKS = 16
_STOPPED_S = 1.0

# Reads or writes memory at an offset of one file.
Move = Callable[[memoryview, int], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Parts of one read or write under way, each with its directory and the threads there.

    `stall_s`: the most seconds in which a directory may end no part at all, however many wait there. Time in which
    this process was stopped does not count. `advice`: what to do then.
    """

    parts: tuple[tuple[Outcome[None], str, TransferThreads], ...] = ()
    stall_s: float = STALL_S
    advice: str = "its state is unknown, so load a checkpoint, with another directory if it stays so"

    def done(self) -> bool:
        """Return whether no part uses its memory any more."""
        return all(outcome.done() for outcome, *_ in self.parts)

    def wait(self) -> None:
        """Wait for all parts.

        Raises the first part's error once all have ended; `DiskStalled` if none ends for `stall_s`.
        """
        for outcome, directory, threads in self.parts:
            if outcome.done():
                continue
            with watched(DiskWork("wait", directory)):
                has_ended = self._ended(outcome, threads)
            if not has_ended:
                raise DiskStalled(
                    f"the disk of {directory} has not answered for {self.stall_s:g} s; {self.advice}"
                )
        for outcome, *_ in self.parts:
            outcome.result()

    def _ended(self, outcome: Outcome[None], threads: TransferThreads) -> bool:
        """Wait for a part; return whether it has ended before its disk counts as stalled."""
        seconds, looks = self.stall_s / _LOOKS, 0
        while looks < _LOOKS:
            begun_s, last_end_s = time.monotonic(), threads.last_end_s
            if outcome.wait(seconds):
                return True
            was_stopped = time.monotonic() - begun_s > seconds + _STOPPED_S
            looks = 0 if was_stopped or threads.last_end_s != last_end_s else looks + 1
        return False


class Volume:
    """A range of bytes in files, read and written by threads.

    `alignment`: addresses, sizes and the memory of transfers must be multiples of it. `stripe_bytes`: how much
    lies in one directory before the next; a multiple of the alignment.

    Raises `DiskError` for directories in which no file can be opened.
    """

    def __init__(
        self,
        directories: Sequence[str],
        *,
        system: System = SYSTEM,
        stripe_bytes: int = STRIPE_BYTES,
        stall_s: float = STALL_S,
        threads: int = THREADS,
    ) -> None:
        self.directories = tuple(directories)
        self.files: tuple[WorkingFile, ...] = tuple(open_file(each, system) for each in directories)
        self.alignment = max(file.alignment for file in self.files)
        self._stripe = max(stripe_bytes // self.alignment, 1) * self.alignment
        self._stall_s = stall_s
        self._threads = [TransferThreads(threads) for _ in self.files]
        self.nbytes = 0

    def check_process(self) -> None:
        """Raise `DiskError` in a forked child."""
        for threads in self._threads:
            threads.check_process()

    def rounded(self, nbytes: int) -> int:
        """Round a size up to a multiple of the alignment."""
        return -(-nbytes // self.alignment) * self.alignment

    def reserve(self, nbytes: int) -> None:
        """Reserve space for addresses below `nbytes`. Raises `DiskFull` if there is not enough."""
        rows = -(-nbytes // (self._stripe * len(self.files)))
        for file in self.files:
            file.reserve(rows * self._stripe)
        self.nbytes = nbytes

    def read(self, address: int, memory: memoryview) -> Transfer:
        """Begin to fill the memory from the volume at `address`."""
        return self._started([file.read for file in self.files], address, memory)

    def write(self, address: int, memory: memoryview) -> Transfer:
        """Begin to write the memory, which must not change until that is done."""
        return self._started([file.write for file in self.files], address, memory)

    def _started(self, moves: Sequence[Move], address: int, memory: memoryview) -> Transfer:
        parts: list[tuple[Outcome[None], str, TransferThreads]] = []
        for index, offset, part in self._parts(address, memory):
            outcome = self._threads[index].submit(partial(moves[index], part, offset))
            parts.append((outcome, self.directories[index], self._threads[index]))
        return Transfer(tuple(parts), self._stall_s)

    def _parts(self, address: int, memory: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Yield the file, the offset in it and the memory of each part."""
        done = 0
        while done < len(memory):
            stripe, within = divmod(address + done, self._stripe)
            row, index = divmod(stripe, len(self.files))
            nbytes = min(self._stripe - within, len(memory) - done)
            yield index, row * self._stripe + within, memory[done : done + nbytes]
            done += nbytes
