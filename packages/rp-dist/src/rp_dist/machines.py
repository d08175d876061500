"""`Machines`: the processes of one training, one per machine, and the transfers between them."""

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
from torch import Tensor

from rp_dist.agreement import MOST_NAMED, Fact, differences
from rp_dist.blocks import link
from rp_dist.blocks.reducer import Reducer, Reduction
from rp_dist.blocks.sums import sum_dtype
from rp_dist.blocks.transfer_queue import TransferQueue
from rp_dist.blocks.wire import GATHER, PASS, REDUCE, Posted, Wire, slot
from rp_dist.blocks.work import Work
from rp_dist.control import Control
from rp_dist.errors import Closed, Disagreement, DistError, InvalidTransfer
from rp_dist.opening.membership import Membership
from rp_dist.opening.opening import Opening

CHUNK_BYTES = 4 << 20
_BUFFER_BYTES = 128 << 20
_AGREEING = -1
# How long to wait at the end for threads that may be stuck in gloo. If a receiver asks for a piece and disappears
# in the same moment, as when a stopped machine wakes, gloo forgets the send, and no error ends the wait for it.
_STUCK_S = 2.0
# A machine that is alive but takes no part has a bug, or waits for one that has.
PATIENCE_S = 3600.0


class Machines:
    """This machine (`rank`) among `size` of them, opened with `Machines.open`; a context manager.

    All machines call the same methods with the same tags, owners and sizes. Sums (`reduce`) have the same order on
    all. Copies may have any order, if the tags of those in progress differ, and by less than 2^20. If a machine
    dies, hangs, loses its link or fails, all calls on all others raise `MachineLost` within `timeout_s`, and so
    does every later call.

    `network_gb_s`: GB/s that the slowest machine sends while it receives as much, measured at opening; infinite
    for one machine. `sent_bytes`, `received_bytes`: bytes of blocks since opening.
    """

    def __init__(self, control: Control, wire: Wire, network_gb_s: float, chunk_bytes: int) -> None:
        self.rank, self.size = control.rank, control.size
        self.network_gb_s = network_gb_s
        self._control, self._wire = control, wire
        self._chunk_bytes = chunk_bytes
        self._is_closed = False
        self._sent_before, self._received_before = wire.sent_bytes, wire.received_bytes
        control.ending.on_loss = wire.abort
        # Separate lanes, so that outgoing copies do not wait for incoming ones.
        self._lanes = {name: TransferQueue(name, wire) for name in ("send", "give", "gather", "pass")}
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
        """Connect to the machines that torchrun started, or to those of the default process group if there is one.

        Args:
            connections: number of connections to each other machine; by default as many as saturate the link, by
                measurement.
            timeout_s: seconds without a heartbeat after which a machine is lost. Opening may take as long.
            chunk_bytes: size of one piece of a reduction. Buffers take 128 MiB, or two chunks from each machine.
            patience_s: seconds after which a machine is lost that is alive but takes no part in a transfer, or
                does not close after another one has.

        Raises `MachineLost` if a machine does not connect, `Disagreement` if settings or versions differ, and
        `InvalidTransfer` without torchrun's environment variables.
        """
        if timeout_s <= 0 or chunk_bytes < 8 or (connections is not None and connections < 1):
            raise InvalidTransfer(
                "timeout_s must be > 0, chunk_bytes >= 8 and connections >= 1, but they are "
                f"{timeout_s}, {chunk_bytes} and {connections} instead"
            )
        opening = Opening(Membership.found(), timeout_s)
        control = opening.meet()
        wire = Wire([], control, patience_s)
        control.ending.on_loss = wire.abort
        control.waited_s, control.patience_s = wire.waited_s, patience_s
        settings: dict[str, Fact] = {
            "connections": connections,
            "timeout_s": timeout_s,
            "chunk_bytes": chunk_bytes,
        }
        try:
            _agree(control, {**settings, "torch": str(torch.__version__).split("+")[0]})
            rate = _connect(opening, wire, connections)
            return cls(control, wire, rate, chunk_bytes)
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
        """The number of connections to each other machine."""
        return len(self._wire.groups)

    # Small values

    def agree(self, facts: Mapping[str, Fact]) -> None:
        """Raise `Disagreement` on all machines unless `facts` are the same on all."""
        self._check_open()
        _agree(self._control, facts)

    def exchange(self, value: object, *, channel: int = 0) -> list[Any]:
        """Send `value` to all machines; return one value from each, in the order of ranks.

        `value`: anything that JSON can hold, up to some MB. Threads that exchange at the same time use different
        channels (numbers from 0). The calls of one channel have the same order on all machines.
        """
        self._check_open()
        if channel < 0:
            raise InvalidTransfer(f"channel must be >= 0, but is {channel} instead")
        return self._control.exchange(value, channel)

    def sum(self, values: Tensor, *, channel: int = 0) -> Tensor:
        """Return the sum over all machines, with the same bits on each: fp64, in the order of ranks, then rounded.

        values: a few numbers, of any shape and floating-point dtype. channel: as for `exchange`.
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
        """Add all machines' blocks at the owner, in fp32 (fp64 for fp64) in the order of ranks.

        Args:
            block: (numel,) on the host, contiguous, floating-point, of the same size and dtype on all machines;
                sent in that dtype.
            out: (numel,) on the owner: the sum, rounded if its dtype is smaller; by default `block`.

        A machine that has nothing to add passes zeros. The bits of the sum depend neither on the order of arrival
        nor on the number of connections.
        """
        self._check(block, owner, tag)
        work = Work(self._control.raise_error)
        gloo_tag = slot(REDUCE, tag, block.nbytes)
        chunk = self._chunk_bytes // block.itemsize
        if self.rank == owner:
            target = block if out is None else out
            _check_out(block, target)
            self._reducer.launch(Reduction(block, target, gloo_tag, chunk, work))
        else:
            self._lanes["send"].launch(partial(self._send, _pieces(block, chunk), [owner], gloo_tag), work)
        return self._finished_if_empty(work, block)

    def gather(self, block: Tensor, owner: int, *, tag: int) -> Work:
        """Copy the owner's block to all machines. block: (numel,) on the host, contiguous, of any dtype."""
        self._check(block, owner, tag)
        others = [rank for rank in range(self.size) if rank != self.rank]
        lane = self._lanes["give" if self.rank == owner else "gather"]
        return self._copy(lane, GATHER, block, owner, others if self.rank == owner else [], tag)

    def pass_on(self, block: Tensor, source: int, target: int, *, tag: int) -> Work:
        """Copy the source's block into the target's. Other machines need not call this."""
        self._check(block, source, tag)
        self._check(block, target, tag)
        if self.rank not in (source, target) or source == target:
            return self._finished_if_empty(Work(self._control.raise_error), block[:0])
        return self._copy(self._lanes["pass"], PASS, block, source, [target] if self.rank == source else [], tag)

    def _copy(
        self, lane: TransferQueue, kind: int, block: Tensor, source: int, targets: list[int], tag: int
    ) -> Work:
        work = Work(self._control.raise_error)
        gloo_tag = slot(kind, tag, block.nbytes)
        pieces = _pieces(block, self._piece(block))
        post = (
            partial(self._send, pieces, targets, gloo_tag)
            if self.rank == source
            else partial(self._receive, pieces, source, gloo_tag)
        )
        lane.launch(post, work)
        return self._finished_if_empty(work, block)

    def _piece(self, block: Tensor) -> int:
        """Return the elements per piece of a copy: a share per connection, but at most a chunk."""
        share = math.ceil(block.numel() / max(1, len(self._wire.groups)))
        return max(1, min(share, self._chunk_bytes // block.itemsize))

    def _send(self, pieces: Sequence[Tensor], targets: Sequence[int], gloo_tag: int) -> list[Posted]:
        return [
            self._wire.send(piece, target, gloo_tag, index)
            for index, piece in enumerate(pieces)
            for target in targets
        ]

    def _receive(self, pieces: Sequence[Tensor], source: int, gloo_tag: int) -> list[Posted]:
        return [self._wire.receive(piece, source, gloo_tag, index) for index, piece in enumerate(pieces)]

    def _finished_if_empty(self, work: Work, block: Tensor) -> Work:
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
        """Tell the others that this machine ends with an error: they raise `MachineLost` with "failed: reason"."""
        self._control.fail(reason)

    def close(self) -> None:
        """Finish the launched transfers, wait until the others close too, and end. May be called twice.

        Raises `MachineLost` if a machine is lost meanwhile. Everything is closed even then.
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
    if different := differences(control.exchange(dict(facts), _AGREEING)):
        more = f", and {len(different) - MOST_NAMED} more" if len(different) > MOST_NAMED else ""
        # No machine ends before all have the facts.
        with suppress(DistError):
            control.exchange(None, _AGREEING)
        raise Disagreement(f"machines do not run the same: {'; '.join(different[:MOST_NAMED])}{more}")


def _connect(opening: Opening, wire: Wire, connections: int | None) -> float:
    """Open the process groups; return the rate of the link."""

    def add(count: int) -> None:
        wire.groups += opening.groups(wire.control, count)

    add(connections or 1)
    if wire.control.size == 1:
        return math.inf
    # A slow link may need longer. `bounded` uses a thread, since gloo may forget a send to a machine that is lost.
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
