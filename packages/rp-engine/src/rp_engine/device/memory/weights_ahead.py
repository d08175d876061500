"""Weights that travel to devices as a step publishes them, before the call that will read them is made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from rp_optim.jobs import Outcome
from rp_state.block import Block
from rp_telemetry.tracing import Tracer
from rp_telemetry.transfer_times import UNTIMED
from rp_transfer import Event, Ticket

from rp_engine.device.memory.weight_cache import Arriving, WeightCache
from rp_engine.device.transfers import bring, upload_from_host
from rp_engine.runtime.lane import Lane
from rp_engine.runtime.porter import Porter
from rp_engine.runtime.tickets import Take

# What kernels take beside torch's allocator, and what its holes waste, is not seen.
_USABLE = 0.92
_Any = TypeVar("_Any")


class _Expected(NamedTuple):
    """A block that is to travel. `ticket`: its turn to be read. `version`: of the model's weights then."""

    ticket: Ticket
    version: int
    tracer: Tracer


class _Begun(NamedTuple):
    """A block that travels, unless it is cancelled before; `block` keeps what is read."""

    block: Block
    memory: torch.Tensor
    arrived: Outcome[Event]
    expected: _Expected

    def cancel(self) -> bool:
        """Cancel the upload and leave its turn, if it has not begun; return whether."""
        is_cancelled = self.arrived.cancel()
        if is_cancelled:
            self.expected.ticket.leave()
        return is_cancelled


class WeightsAhead(WeightCache):
    """A model's trained weights on their way to one device for the training call that comes next.

    The launcher's thread says which are expected, the optimizer's thread sends each as it is published. A task
    finds here what has begun to travel, and has not changed since; it brings all else by itself. Whatever no task
    of the call asks for is freed at the next step, or when the device's memory is short.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._expected: dict[Block, _Expected] = {}
        self._begun: dict[Block, _Begun] = {}
        self._version = -1
        # The largest peak without these weights, by what is known, and how many bytes may be in the present one.
        self._other_bytes = self._sent_bytes = 0
        clear = partial(_clear, weakref.ref(self))
        lane.reserves.append(clear)
        weakref.finalize(self, _end, lane, clear, self._expected, self._begun)

    def expect(self, blocks: Iterable[Block], version: int, take: Take, tracer: Tracer) -> None:
        """Have these blocks travel once all turns on them that were taken before are over.

        Not if a call has left some of the last ones, as the next one may; if the device has tasks to begin, whose
        weights come first; or if its memory is short. `version`: of the model's weights then.
        """
        wanted = list(blocks)
        are_left = self.clear() is not None
        if are_left or not wanted or self._lane.has_jobs:
            return
        if not self._has_room(sum(block.nbytes for block in wanted)):
            return
        found = {block: _Expected(take(block.turns, write=False), version, tracer) for block in wanted}
        with self._lock:
            self._expected.update(found)
        self._sent_bytes, self._lane.has_raised_peak = sum(block.nbytes for block in wanted), True

    def send(self, block: Block) -> None:
        """Have a block travel if it is expected and its turn has come."""
        with self._lock:
            if block not in self._expected or not self._expected[block].ticket.open():
                return
            expected = self._expected.pop(block)
            try:
                self._begun[block] = self._sent(block, expected)
            except RuntimeError:
                # Memory is short, or the runtime closes: a task that needs the block brings it.
                expected.ticket.leave()

    def _sent(self, block: Block, expected: _Expected) -> _Begun:
        inbox = self._lane.inbox
        numel, dtype = block.form(coded=False)
        memory = self._lane.device.empty((numel,), dtype, stream=inbox.stream)
        upload = partial(upload_from_host, inbox, block, memory)
        job = partial(bring, inbox, block, memory, expected.ticket, UNTIMED, expected.tracer, upload)
        return _Begun(block, memory, inbox.submit(_leaving, expected.ticket, job), expected)

    def _has_room(self, nbytes: int) -> bool:
        use, device = self._lane.device.memory(), self._lane.device
        # The task that runs may reach its peak again, and the next one finds its weights here.
        self._other_bytes = max(self._other_bytes, use.peak_bytes - self._sent_bytes)
        return use.is_complete and self._other_bytes + nbytes <= _USABLE * device.obtainable_bytes()

    def begin(self, call: int, version: int) -> None:
        """Begin a call that reads weights of this version."""
        del call
        self._version = version

    def find(self, block: Block) -> Arriving | None:
        """Return a block for its task to free, if it has begun to travel and has not changed."""
        with self._lock:
            expected, begun = self._expected.pop(block, None), self._begun.pop(block, None)
        _leave([] if expected is None else [expected])
        if begun is None or begun.cancel() or (begun.arrived.done() and begun.arrived.exception()):
            return None
        if begun.expected.version == self._version:
            return begun.memory, begun.arrived
        self._free([begun])
        return None

    def expect_no_more(self) -> None:
        """Give up those that have not begun to travel: who writes them waits for their turns."""
        with self._lock:
            expected = _taken(self._expected)
        _leave(expected)

    def clear(self) -> Outcome[None] | None:
        """Free all blocks once what copies them is over; return the outcome of that, None if there are none."""
        with self._lock:
            expected, begun = _taken(self._expected), _taken(self._begun)
        _leave(expected)
        return self._free([one for one in begun if not one.cancel()]) if expected or begun else None

    def _free(self, begun: Sequence[_Begun]) -> Outcome[None]:
        return _outlasted(self._lane.inbox, begun)


def _taken(blocks: dict[Block, _Any]) -> list[_Any]:
    found = list(blocks.values())
    blocks.clear()
    return found


def _leaving(ticket: Ticket, job: Callable[[], Event]) -> Event:
    """Upload a block; leave its turn also if that fails."""
    try:
        return job()
    except BaseException:
        ticket.leave()
        raise


def _outlasted(inbox: Porter, begun: Sequence[_Begun]) -> Outcome[None]:
    return inbox.submit(_outlast, inbox, begun)


def _end(
    lane: Lane, clear: Callable[[], None], expected: dict[Block, _Expected], begun: dict[Block, _Begun]
) -> None:
    """The model is gone: what has begun to travel reads its memory."""
    lane.reserves.remove(clear)
    _leave(_taken(expected))
    under_way = [one for one in _taken(begun) if not one.cancel()]
    # A runtime that is closed has nothing under way.
    with suppress(RuntimeError):
        if under_way:
            _outlasted(lane.inbox, under_way)


def _leave(expected: Iterable[_Expected]) -> None:
    for one in expected:
        one.ticket.leave()


def _outlast(porter: Porter, begun: Sequence[_Begun]) -> None:
    """Keep blocks until all copies that the porter has queued are over."""
    porter.conveyor.drain()
    del begun


def _clear(ahead: weakref.ref[WeightsAhead]) -> None:
    if (found := ahead()) is not None and (freed := found.clear()) is not None:
        freed.wait()
