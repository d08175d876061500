"""`Machines`: the processes of one training, one on each machine, and what moves between them."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rp_dist.agreement import MOST_NAMED, Fact, differences
from rp_dist.blocks import link
from rp_dist.blocks.lanes import Lane
from rp_dist.blocks.reducer import Reducer, Reduction
from rp_dist.blocks.sums import sum_dtype
from rp_dist.blocks.wire import GATHER, PASS, REDUCE, Posted, Wire, slot
from rp_dist.blocks.work import Work
from rp_dist.control import Control
from rp_dist.errors import Closed, Disagreement, DistError, InvalidTransfer
from rp_dist.opening import Opening, Place

CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 128 << 20
_AGREEING = -1
# Gloo forgets a send whose receiver asks for it and is gone in the same moment, as when a machine was stopped and
# wakes: no error ends the wait for it. Its thread does nothing any more.
_STUCK_S = 2.0
# A machine that lives but takes no part is a mistake, or waits for one.
PATIENCE_S = 3600.0


class Machines:
    """This machine (`rank`) among `size` of them, opened with `Machines.open`; a context manager.

    All machines call the same methods with the same tags, owners and sizes: sums (`reduce`) in the same order,
    copies in any, as long as the tags of those under way differ, and by less than 2^20. A machine that dies,
    hangs, loses its link or fails raises `MachineLost` in all calls of all others, within `timeout_s`, and every
    call after that raises it, too.

    `link_gb_s`: GB/s that the slowest machine sends while it receives as much, measured when opened; infinite for
    one machine. `sent_bytes`, `received_bytes`: of blocks, since opened.
    """

    def __init__(
        self, control: Control, wire: Wire, link_gb_s: float, chunk_bytes: int, makes_default: bool
    ) -> None:
        self.rank, self.size = control.rank, control.size
        self.link_gb_s = link_gb_s
        self._control, self._wire = control, wire
        self._chunk_bytes = chunk_bytes
        self._makes_default = makes_default
        self._is_closed = False
        self._sent_before, self._received_before = wire.sent_bytes, wire.received_bytes
        control.on_loss = wire.abort
        # Copies that leave do not wait for the end of those that arrive.
        self._lanes = {name: Lane(name, wire) for name in ("send", "give", "gather", "pass")}
        others = max(1, self.size - 1)
        count = max(2, min(2 * len(wire.groups), _BUFFER_BYTES // (others * chunk_bytes)))
        self._reducer = Reducer(wire, chunk_bytes, count)
        # Threads that wait in gloo must not outlive the interpreter.
        atexit.register(self._end)

    @classmethod
    def open(
        cls,
        *,
        connections: int | None = None,
        timeout_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Open the machines that torchrun started, or those of the default process group if there is one.

        Args:
            connections: to each other machine; by default as many as fill the link, by measurement.
            timeout_s: a machine is lost after so many seconds without a sign of life; opening may take as long.
            chunk_bytes: of one piece of a reduction. Buffers take 128 MiB, or two chunks from each machine.
            patience_s: a machine is lost that lives but for so many seconds takes no part in a transfer or, where
                another one has closed, does not close.

        Raises `MachineLost` where a machine does not come, `Disagreement` where settings or versions differ, and
        `InvalidTransfer` without torchrun's environment variables.
        """
        if timeout_s <= 0 or chunk_bytes < 8 or (connections is not None and connections < 1):
            raise InvalidTransfer(
                "timeout_s must be > 0, chunk_bytes >= 8 and connections >= 1, but they are "
                f"{timeout_s}, {chunk_bytes} and {connections} instead"
            )
        opening = Opening(Place.found(), timeout_s)
        makes_default = not dist.is_initialized()
        control = opening.meet()
        wire = Wire([], control, patience_s)
        control.on_loss, control.waited_s, control.patience_s = wire.abort, wire.waited_s, patience_s
        settings: dict[str, Fact] = {
            "connections": connections,
            "timeout_s": timeout_s,
            "chunk_bytes": chunk_bytes,
        }
        try:
            _agree(control, {**settings, "torch": str(torch.__version__).split("+")[0]})
            rate = _connect(opening, wire, connections)
            return cls(control, wire, rate, chunk_bytes, makes_default)
        except BaseException as error:
            control.fail(f"{type(error).__name__}: {error}")
            wire.abort()
            control.end()
            raise

    @property
    def sent_bytes(self) -> int:
        """Bytes of blocks that this machine sent."""
        return self._wire.sent_bytes - self._sent_before

    @property
    def received_bytes(self) -> int:
        """Bytes of blocks that this machine received."""
        return self._wire.received_bytes - self._received_before

    @property
    def connections(self) -> int:
        """How many connections there are to each other machine."""
        return len(self._wire.groups)

    # Small values

    def agree(self, facts: Mapping[str, Fact]) -> None:
        """Raise `Disagreement` on all machines unless `facts` are the same on all."""
        self._check_open()
        _agree(self._control, facts)

    def exchange(self, value: object, *, channel: int = 0) -> list[Any]:
        """One value from each machine, in the order of ranks. `value`: what JSON can hold, up to some MB.

        Threads that exchange at the same time use channels of their own, numbers from 0; calls of one channel have
        the same order on all machines.
        """
        self._check_open()
        if channel < 0:
            raise InvalidTransfer(f"channel must be >= 0, but is {channel} instead")
        return self._control.exchange(value, channel)

    def sum(self, values: Tensor, *, channel: int = 0) -> Tensor:
        """The sum over all machines, the same bits on each: added in fp64 in the order of ranks, then rounded.

        values: a few numbers, of any shape and floating-point dtype. Channels are those of `exchange`.
        """
        mine = cast(list[float], values.detach().to(torch.float64).flatten().tolist())  # pyright: ignore
        every = self.exchange(mine, channel=channel)
        if len({len(each) for each in every}) > 1:
            raise Disagreement(
                f"machines sum different numbers of values: {[len(each) for each in every]}, by rank"
            )
        total = torch.tensor(every[0], dtype=torch.float64)
        for each in every[1:]:
            total += torch.tensor(each, dtype=torch.float64)
        return total.to(values.dtype).view(values.shape)

    # Blocks

    def reduce(self, block: Tensor, owner: int, *, tag: int, out: Tensor | None = None) -> Work:
        """Add all machines' blocks at their owner, in fp32 (fp64 for fp64) in the order of ranks.

        block: (numel,) on the host, contiguous, floating-point, the same on all machines; sent in its own dtype.
        out: (numel,) on the owner, where the sum is written, rounded if its dtype is smaller; by default `block`.

        A machine that has nothing to add passes zeros. Bits depend neither on what arrives first nor on the number
        of connections.
        """
        self._check(block, owner, tag)
        work = Work(self._control.raise_error)
        place = slot(REDUCE, tag, block.nbytes)
        chunk = self._chunk_bytes // block.itemsize
        if self.rank == owner:
            target = block if out is None else out
            _check_out(block, target)
            self._reducer.launch(Reduction(block, target, place, chunk, work))
        else:
            self._lanes["send"].launch(partial(self._send, _pieces(block, chunk), [owner], place), work)
        return self._started(work, block)

    def gather(self, block: Tensor, owner: int, *, tag: int) -> Work:
        """Copy the owner's block into everybody's. block: (numel,) on the host, contiguous, of any dtype."""
        self._check(block, owner, tag)
        others = [rank for rank in range(self.size) if rank != self.rank]
        lane = self._lanes["give" if self.rank == owner else "gather"]
        return self._copy(lane, GATHER, block, owner, others if self.rank == owner else [], tag)

    def pass_on(self, block: Tensor, source: int, target: int, *, tag: int) -> Work:
        """Copy the source's block into the target's; other machines need not call it."""
        self._check(block, source, tag)
        self._check(block, target, tag)
        if self.rank not in (source, target) or source == target:
            return self._started(Work(self._control.raise_error), block[:0])
        return self._copy(self._lanes["pass"], PASS, block, source, [target] if self.rank == source else [], tag)

    def _copy(self, lane: Lane, kind: int, block: Tensor, source: int, targets: list[int], tag: int) -> Work:
        work = Work(self._control.raise_error)
        place = slot(kind, tag, block.nbytes)
        pieces = _pieces(block, self._piece(block))
        post = (
            partial(self._send, pieces, targets, place)
            if self.rank == source
            else partial(self._receive, pieces, source, place)
        )
        lane.launch(post, work)
        return self._started(work, block)

    def _piece(self, block: Tensor) -> int:
        """Elements of one piece where nothing is buffered: all connections carry the block, in chunks at least."""
        share = math.ceil(block.numel() / max(1, len(self._wire.groups)))
        return max(1, min(share, self._chunk_bytes // block.itemsize))

    def _send(self, pieces: Sequence[Tensor], targets: Sequence[int], place: int) -> list[Posted]:
        return [
            self._wire.send(piece, target, place, index)
            for index, piece in enumerate(pieces)
            for target in targets
        ]

    def _receive(self, pieces: Sequence[Tensor], source: int, place: int) -> list[Posted]:
        return [self._wire.receive(piece, source, place, index) for index, piece in enumerate(pieces)]

    def _started(self, work: Work, block: Tensor) -> Work:
        if block.numel() == 0:
            work.finish()
        return work

    def _check(self, block: Tensor, rank: int, tag: int) -> None:
        self._check_open()
        if block.device.type != "cpu" or not block.is_contiguous() or block.dim() != 1:
            raise InvalidTransfer(
                "a block must be a contiguous tensor of one dimension in host memory, but it is "
                f"{tuple(block.shape)} with strides {block.stride()} on {block.device} instead"
            )
        if not 0 <= rank < self.size or tag < 0:
            raise InvalidTransfer(f"ranks are 0 to {self.size - 1} and tags >= 0; rank {rank}, tag {tag} instead")

    def _check_open(self) -> None:
        self._control.raise_error()
        if self._is_closed:
            raise Closed("the machines are closed; open them again")

    # The end

    def fail(self, reason: str) -> None:
        """Tell the others that this machine ends with an error of its own: they raise "failed: reason"."""
        self._control.fail(reason)

    def close(self) -> None:
        """Finish what was launched, wait for the others to close, too, and end; may be called twice.

        Raises `MachineLost` where a machine is lost meanwhile; everything is closed then, too.
        """
        if self._is_closed:
            return
        try:
            self._control.raise_error()
            self._drain()
            self._control.leave()
        finally:
            self._end()

    def _drain(self, limit_s: float | None = None) -> None:
        for lane in self._lanes.values():
            lane.close(limit_s)
        self._reducer.close(limit_s)

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._end)
        self._wire.abort()
        self._control.end()
        self._drain(_STUCK_S)
        self._wire.close()
        if self._makes_default and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(f"{type(error).__name__}: {error}")
            self._end()


def _agree(control: Control, facts: Mapping[str, Fact]) -> None:
    if found := differences(control.exchange(dict(facts), _AGREEING)):
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        # Nobody leaves before all have the facts.
        with suppress(DistError):
            control.exchange(None, _AGREEING)
        raise Disagreement(f"machines do not run the same: {'; '.join(found[:MOST_NAMED])}{more}")


def _connect(opening: Opening, wire: Wire, connections: int | None) -> float:
    """Open the groups; the rate of the link."""

    def add(count: int) -> None:
        wire.groups += opening.groups(wire.control, count)

    add(connections or 1)
    if wire.control.size == 1:
        return math.inf
    # A slow link may take its time. A thread of its own, since gloo may forget a send to a machine that is lost.
    opening.deadline_s = time.monotonic() + wire.patience_s
    measure = partial(link.measure, wire) if connections else partial(link.fill, wire, add)
    return opening.bounded(measure, wire.control, wire.control.rank)


def _pieces(block: Tensor, numel: int) -> list[Tensor]:
    return [block[begin : begin + numel] for begin in range(0, block.numel(), numel)]


def _check_out(block: Tensor, out: Tensor) -> None:
    if not block.is_floating_point():
        raise InvalidTransfer(f"only floating-point blocks are added, but its dtype is {block.dtype} instead")
    fits = out.dtype in (block.dtype, sum_dtype(block.dtype)) and out.shape == block.shape and out.is_contiguous()
    if not fits or out.device.type != "cpu":
        raise InvalidTransfer(
            f"out must be contiguous host memory of shape {tuple(block.shape)} and dtype "
            f"{sum_dtype(block.dtype)} or {block.dtype}, but is {tuple(out.shape)} {out.dtype} on "
            f"{out.device} instead"
        )
