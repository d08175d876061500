"""Transfers of blocks by a device's porter threads: weights to the device, gradients to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from rp_state.block import Block
from rp_state.gradient import Gradient
from rp_telemetry.tracing import SILENT, Tracer
from rp_telemetry.transfer_times import UNTIMED, Untimed
from rp_transfer import Event, Expected, Ticket

from rp_engine.errors import add_note
from rp_engine.runtime.porter import Porter


@dataclass(frozen=True, slots=True)
class Delivery:
    """A download of gradient sums to the host. The porter that runs it enters and leaves their turns.

    `made`: the event after which the sums are complete. `sums`: for each block, its sums on the device (numel,),
    the indices of the parameters that have a gradient, and the ticket of its turn.
    """

    porter: Porter
    made: Event
    sums: list[tuple[Block, torch.Tensor, set[int], Ticket]]
    times: Untimed = UNTIMED
    tracer: Tracer = SILENT

    @property
    def nbytes(self) -> int:
        """Bytes of the sums on the device."""
        return sum(memory.nbytes for _, memory, _, _ in self.sums)

    def run(self) -> None:
        """Download block by block; when it returns, the device memory of the sums may be freed."""
        conveyor = self.porter.conveyor
        with self._waiting("backward", "wait for backward"):
            self.porter.stream.wait(self.made)
        for block, memory, written, ticket in self.sums:
            with self._waiting("turn", "wait for gradients of {}", block):
                ticket.enter()
            if written:
                with self._traced(block, block.gradient.arriving_nbytes):
                    self._receive(block.gradient, memory, written)
            ticket.leave(conveyor.record())
        conveyor.drain()

    def _receive(self, gradient: Gradient, memory: torch.Tensor, written: set[int]) -> None:
        porter, nbytes = self.porter, gradient.arriving_nbytes
        moving = self.times.begin(porter.device.name, porter.stream)
        is_added = gradient.receive(memory, written, porter.conveyor)
        moving.end("add" if is_added else "down", nbytes)

    def abandon(self) -> None:
        """After a failure, wait for the copies already queued, so that the sums may be freed."""
        self.porter.conveyor.drain()

    def _waiting(self, reason: str, name: str, *parts: object) -> AbstractContextManager[None]:
        porter = self.porter
        return self.tracer.on_stream(porter.device, porter.stream, "wait", name, *parts, reason=reason)

    def _traced(self, block: Block, nbytes: int) -> AbstractContextManager[None]:
        porter = self.porter
        return self.tracer.on_stream(
            porter.device, porter.stream, "download", "gradients of {}", block, nbytes=nbytes
        )

    def leave(self) -> None:
        """Leave all turns; later turns still wait for the copies already queued."""
        begun = self.porter.conveyor.record()
        for *_, ticket in self.sums:
            ticket.leave(begun)


def bring(
    porter: Porter,
    block: Block,
    memory: torch.Tensor,
    ticket: Ticket,
    times: Untimed,
    tracer: Tracer,
    upload: Callable[[], None],
) -> Event:
    """Upload a block into device memory and leave its turn, except a writer's: layers may write then.

    `memory`: one of the block's forms. `upload`: queues the copies into it.

    Returns the event after which the memory is readable.
    """
    with _traced(tracer, porter, block, memory, "wait"):
        ticket.enter(None if block.is_staged else porter.stream)
    with _traced(tracer, porter, block, memory, "upload"):
        moving = times.begin(porter.device.name, porter.stream)
        upload()
        moving.end("up", memory.nbytes, is_staged=block.is_staged)
    arrived = porter.conveyor.record()
    if not ticket.writes:
        ticket.leave(arrived)
    return arrived


def bring_again(porter: Porter, upload: Callable[[], None]) -> Event:
    """Upload a block whose turn was left when it came before; see `bring`."""
    upload()
    return porter.conveyor.record()


def upload_from_host(porter: Porter, block: Block, memory: torch.Tensor) -> None:
    """Upload what calls read."""
    for target, source in block.pieces(memory):
        porter.conveyor.upload(target, source)


def upload_from_disk(porter: Porter, block: Block, expected: Expected) -> None:
    """Upload a block's pieces on disk, which were announced to the porter's conveyor."""
    try:
        porter.conveyor.upload_read(expected)
    except Exception as error:
        # The task that waits for it may be at another layer.
        add_note(error, f"RoundPipe: while the frozen weights of {block} were read from disk")
        raise


def save(porter: Porter, memory: torch.Tensor, written: Sequence[Event]) -> torch.Tensor:
    """Copy a block, (numel,), from a device to the host: its turn was left, so the host may have newer weights.

    `written`: the events after which the block is readable.
    """
    held = torch.empty(memory.shape, dtype=memory.dtype, device="cpu")
    for event in written:
        porter.stream.wait(event)
    # The host's memory is not pinned: the copy is over on return.
    porter.conveyor.download(held, memory)
    return held


def _traced(
    tracer: Tracer, porter: Porter, block: Block, memory: torch.Tensor, kind: Literal["wait", "upload"]
) -> AbstractContextManager[None]:
    device, stream = porter.device, porter.stream
    if kind == "wait":
        return tracer.on_stream(device, stream, kind, "wait for the turn of weights of {}", block, reason="turn")
    return tracer.on_stream(device, stream, kind, "weights of {}", block, nbytes=memory.nbytes)
