"""Test programs as printable data: sequences of steps that use host and device memory.

A program has no loops and no threads. Its results are those of running it step by step on plain tensors. A backend
runs the steps on streams; it must give the same results, because waits order all conflicting steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

STREAMS = ("compute", "weights_in", "activations_in", "results_out", "gradients_out")


@dataclass(frozen=True, slots=True, order=True)
class StreamName:
    """One stream of one device.

    >>> print(StreamName(1, "weights_in"))
    1/weights_in
    """

    device: int
    stream: str

    def __str__(self) -> str:
        return f"{self.device}/{self.stream}"


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """The elements ``[start, stop)`` of the memory called `name`."""

    name: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    def overlaps(self, other: MemoryRange) -> bool:
        """Return whether both have an element in common."""
        return self.name == other.name and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate memory: on the host if `owner` is None, else on a device, owned by that stream."""

    name: str
    numel: int
    owner: StreamName | None

    def __str__(self) -> str:
        return f"{self.name} = {'host' if self.owner is None else self.owner} takes {self.numel}"


@dataclass(frozen=True, slots=True)
class Free:
    """Free the memory called `name`."""

    name: str

    def __str__(self) -> str:
        return f"free {self.name}"


@dataclass(frozen=True, slots=True)
class Write:
    """Write ``first, first + 1, ...`` (modulo `MODULUS`) on the host."""

    piece: MemoryRange
    first: int

    def __str__(self) -> str:
        return f"host: {self.piece} = {self.first}, ..."


@dataclass(frozen=True, slots=True)
class Read:
    """Read on the host; this adds an entry to the program's results."""

    piece: MemoryRange

    def __str__(self) -> str:
        return f"host: read {self.piece}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy on a stream, between host and device."""

    lane: StreamName
    destination: MemoryRange
    source: MemoryRange

    def __str__(self) -> str:
        return f"{self.lane}: {self.destination} <- {self.source}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute on the compute stream: ``destination = (sum of sources + constant) % MODULUS``."""

    lane: StreamName
    destination: MemoryRange
    sources: tuple[MemoryRange, ...]
    constant: int

    def __str__(self) -> str:
        return f"{self.lane}: {self.destination} = {' + '.join(map(str, (*self.sources, self.constant)))}"


@dataclass(frozen=True, slots=True)
class Record:
    """Record an event after everything enqueued on the stream so far."""

    lane: StreamName
    event: str

    def __str__(self) -> str:
        return f"{self.event} = {self.lane}: record"


@dataclass(frozen=True, slots=True)
class Wait:
    """Order later work of stream `lane`, or of the host if it is None, after `event`."""

    lane: StreamName | None
    event: str

    def __str__(self) -> str:
        return f"{'host' if self.lane is None else self.lane}: wait {self.event}"


Step = Allocate | Free | Write | Read | Copy | Compute | Record | Wait

# Two values and a constant below 50 sum to less than 250: exact in every dtype, bfloat16 and uint8 included.
MODULUS = 101


@dataclass(frozen=True, slots=True)
class Program:
    """A sequence of steps for `devices` devices; all memory has one dtype.

    >>> print(Program(1, torch.int64, (Allocate("h0", 4, None), Write(MemoryRange("h0", 0, 4), 7))))
    program for 1 device(s) in torch.int64
      0  h0 = host takes 4
      1  host: h0[0:4] = 7, ...
    """

    devices: int
    dtype: torch.dtype
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"{index:>3}  {step}" for index, step in enumerate(self.steps)]
        return "\n".join([f"program for {self.devices} device(s) in {self.dtype}", *lines])


def without(program: Program, index: int) -> Program:
    """Return the same program without the step at `index`.

    >>> len(without(Program(1, torch.int64, (Free("a"), Free("b"))), 0).steps)
    1
    """
    return replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
