"""Two interpreters of programs: a sequential one on plain tensors, and one on the streams of a backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rp_transfer.api import Backend, Event, Stream
from rp_transfer.errors import NotConforming
from rp_transfer.testing.programs import (
    MODULUS,
    Allocate,
    Compute,
    Copy,
    Free,
    MemoryRange,
    Program,
    Read,
    Record,
    Step,
    StreamName,
    Wait,
    Write,
)

# One entry for each `Read` of the program, in order.
Results = list[list[float]]


class ProgramMemory:
    """A program's tensors by name. Each is the only reference to its memory.

    Each has `unit` elements for every element that the program names.
    """

    def __init__(self, unit: int = 1) -> None:
        self.at: dict[str, torch.Tensor] = {}
        self._unit = unit

    def piece(self, piece: MemoryRange) -> torch.Tensor:
        """View a piece: ((stop - start) * unit,)."""
        return self.at[piece.name][piece.start * self._unit : piece.stop * self._unit]

    def write(self, step: Write) -> None:
        """Run a write on the host."""
        here = self.piece(step.piece).view(-1, self._unit)
        here.copy_((torch.arange(len(here)) + step.first).remainder(MODULUS).unsqueeze(1))

    def compute(self, step: Compute) -> None:
        """Run a computation, with temporary tensors as in any layer."""
        there = self.piece(step.destination)
        total = torch.full_like(there, step.constant)
        for source in step.sources:
            total = total + self.piece(source)
        there.copy_(total.remainder(MODULUS))

    def read(self, step: Read) -> list[float]:
        """Run a read on the host; return (stop - start) numbers, NaN where the elements of a unit differ."""
        units = self.piece(step.piece).view(-1, self._unit)
        first = units[:, 0].double()
        if self._unit > 1:
            first = first.masked_fill((units != units[:, :1]).any(dim=1), math.nan)
        # Torch's stub leaves the list's element type open.
        return first.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def in_order(program: Program) -> Results:
    """Run the program step by step; `Record` and `Wait` do nothing."""
    memory = ProgramMemory()
    results: Results = []
    for step in program.steps:
        match step:
            case Allocate():
                memory.at[step.name] = torch.zeros(step.numel, dtype=program.dtype)
            case Free():
                del memory.at[step.name]
            case Write():
                memory.write(step)
            case Read():
                results.append(memory.read(step))
            case Copy():
                memory.piece(step.destination).copy_(memory.piece(step.source))
            case Compute():
                memory.compute(step)
            case Record() | Wait():
                pass
    return results


class Interpreter:
    """Runs steps on a backend, from a single thread."""

    def __init__(self, backend: Backend, dtype: torch.dtype, unit: int) -> None:
        self.results: Results = []
        self._backend = backend
        self._dtype = dtype
        self._unit = unit
        self._memory = ProgramMemory(unit)
        self._events: dict[str, Event] = {}
        self._attached: int | None = None

    def run(self, steps: Sequence[Step]) -> None:
        """Run all steps, wait for every device, and free the memory."""
        for step in steps:
            self._do(step)
        for index, device in enumerate(self._backend.devices):
            self._attach(index)
            device.synchronize()
        self._memory.at.clear()

    def _do(self, step: Step) -> None:
        match step:
            case Allocate():
                self._memory.at[step.name] = self._take(step)
            case Free():
                del self._memory.at[step.name]
            case Write():
                self._backend.host_touch(write=[self._memory.piece(step.piece)], what=str(step))
                self._memory.write(step)
            case Read():
                self._backend.host_touch(read=[self._memory.piece(step.piece)], what=str(step))
                self.results.append(self._memory.read(step))
            case Copy():
                source, destination = self._memory.piece(step.source), self._memory.piece(step.destination)
                self._stream(step.lane).copy(destination, source)
            case Compute():
                self._compute(step)
            case Record():
                self._events[step.event] = self._stream(step.lane).record()
            case Wait():
                self._wait(step)

    def _take(self, step: Allocate) -> torch.Tensor:
        if step.owner is None:
            return self._backend.host_empty((step.numel * self._unit,), self._dtype)
        stream, device = self._stream(step.owner), self._backend.devices[step.owner.device]
        return device.empty((step.numel * self._unit,), self._dtype, stream=stream)

    def _compute(self, step: Compute) -> None:
        stream = self._stream(step.lane)
        with self._backend.devices[step.lane.device].computing():
            sources = [self._memory.piece(source) for source in step.sources]
            stream.touch(read=sources, write=[self._memory.piece(step.destination)], what=str(step))
            self._memory.compute(step)

    def _wait(self, step: Wait) -> None:
        event = self._events[step.event]
        if step.lane is not None:
            self._stream(step.lane).wait(event)
            return
        event.synchronize()
        if not event.query():
            raise NotConforming(f"query() of {step.event} must be True once synchronize() has returned")

    def _stream(self, lane: StreamName) -> Stream:
        self._attach(lane.device)
        return getattr(self._backend.devices[lane.device], lane.stream)

    def _attach(self, device: int) -> None:
        if self._attached != device:
            self._backend.devices[device].attach_thread()
            self._attached = device
