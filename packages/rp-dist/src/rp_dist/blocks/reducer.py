"""`Reducer`: the owner's side of reductions, chunk by chunk, in a bounded number of buffers."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from rp_dist.blocks.sums import add_in_order, sum_dtype
from rp_dist.blocks.wire import Posted, Wire
from rp_dist.blocks.work import Work


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of a block that this machine owns. `slot`: gloo's tag. `chunk`: the elements of one piece."""

    block: Tensor
    out: Tensor
    slot: int
    chunk: int
    work: Work


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One piece that is being received: each other machine's part arrives in a row of `buffers`."""

    reduction: Reduction
    begin: int
    buffers: Tensor
    posted: list[Posted]

    @property
    def end(self) -> int:
        return min(self.begin + self.reduction.chunk, self.reduction.block.numel())


class Reducer:
    """Receives up to `count` chunks of `chunk_bytes` at once from each other machine; adds them in launch order.

    Adding a chunk overlaps the arrival of later ones. Memory: (size - 1) x `count` x `chunk_bytes`.
    """

    def __init__(self, wire: Wire, chunk_bytes: int, count: int) -> None:
        self._wire = wire
        self._rank, self._size = wire.control.rank, wire.control.size
        self._chunk_bytes = chunk_bytes
        self._free: list[Tensor] = []
        self._unallocated = count
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._pieces: deque[tuple[Reduction, int]] = deque()
        self._is_closing = False
        self._queue: SimpleQueue[Reduction | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rp-dist-reduce", daemon=True)
        self._thread.start()

    def launch(self, reduction: Reduction) -> None:
        """Queue a reduction."""
        self._queue.put(reduction)

    def close(self, limit_s: float | None = None) -> None:
        """Finish the queued reductions and end the thread. After `limit_s`, abandon it if it has not ended."""
        self._queue.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        receiving: deque[_Chunk] = deque()
        while True:
            while self._has_buffers() and (piece := self._next(may_wait=not receiving)) is not None:
                self._begin(*piece, receiving)
            if not receiving:
                return
            self._complete(receiving.popleft())

    def _has_buffers(self) -> bool:
        return bool(self._free) or self._unallocated > 0

    def _next(self, *, may_wait: bool) -> tuple[Reduction, int] | None:
        """Return the next piece to receive; None at the end, or if none is queued and `may_wait` is false."""
        while not self._pieces:
            if self._is_closing or (not may_wait and self._queue.empty()):
                return None
            reduction = self._queue.get()
            if reduction is None:
                self._is_closing = True
            else:
                self._pieces.extend((reduction, begin) for begin in _chunk_starts(reduction))
        return self._pieces.popleft()

    def _begin(self, reduction: Reduction, begin: int, receiving: deque[_Chunk]) -> None:
        chunk = _Chunk(reduction, begin, self._take_buffers(), [])
        receiving.append(chunk)
        if reduction.work.done():
            return  # The reduction has failed.
        try:
            for rank in range(self._size):
                if rank != self._rank:
                    part = self._part(chunk, rank)
                    chunk.posted.append(self._wire.receive(part, rank, reduction.slot, begin // reduction.chunk))
        except BaseException as error:
            reduction.work.finish(error)

    def _take_buffers(self) -> Tensor:
        if self._free:
            return self._free.pop()
        self._unallocated -= 1
        return torch.empty(self._size - 1, self._chunk_bytes, dtype=torch.uint8)

    def _part(self, chunk: _Chunk, rank: int) -> Tensor:
        block = chunk.reduction.block
        if rank == self._rank:
            return block[chunk.begin : chunk.end]
        row = chunk.buffers[rank - (rank > self._rank)]
        return row[: (chunk.end - chunk.begin) * block.itemsize].view(block.dtype)

    def _complete(self, chunk: _Chunk) -> None:
        reduction = chunk.reduction
        try:
            for posted in chunk.posted:
                self._wire.wait(posted)
            if not reduction.work.done():
                self._add(chunk)
        except BaseException as error:
            reduction.work.finish(error)
        self._free.append(chunk.buffers)
        if chunk.end == reduction.block.numel():
            reduction.work.finish()

    def _add(self, chunk: _Chunk) -> None:
        parts = [self._part(chunk, rank) for rank in range(self._size)]
        dtype = sum_dtype(parts[0].dtype)
        nbytes = 2 * parts[0].numel() * dtype.itemsize
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        add_in_order(
            parts, chunk.reduction.out[chunk.begin : chunk.end], self._scratch[:nbytes].view(dtype).view(2, -1)
        )


def _chunk_starts(reduction: Reduction) -> range:
    return range(0, reduction.block.numel(), reduction.chunk)
