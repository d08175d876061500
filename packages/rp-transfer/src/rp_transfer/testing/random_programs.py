"""Random correct programs: steps drawn one by one, each after the waits that it needs and some others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from rp_transfer.testing.hazards import Order, steps_in
from rp_transfer.testing.programs import (
    MODULUS,
    STREAMS,
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

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int16, torch.int64)

_MAX_NUMEL = 12
_MAX_LIVE = 5


def random_program(seed: int, devices: int, *, length: int = 24) -> Program:
    """Return a correct program of about three times `length` steps; the same arguments give the same program.

    Nearly all of its results depend on order: a backend that loses a wait probably gives wrong results, and one
    that checks order must always detect it.

    >>> random_program(0, devices=2) == random_program(0, devices=2)
    True
    """
    draft = _Draft(random.Random(seed), devices)
    draft.begin()
    for _ in range(length):
        draft.extend()
    draft.finish()
    return Program(devices, draft.random.choice(DTYPES), tuple(draft.steps))


@dataclass(slots=True)
class _Draft:
    random: random.Random
    devices: int
    steps: list[Step] = field(default_factory=list[Step])
    _order: Order = field(default_factory=Order)
    _host: dict[str, Allocate] = field(default_factory=dict[str, Allocate])
    _remote: dict[str, Allocate] = field(default_factory=dict[str, Allocate])
    _names: int = 0

    def begin(self) -> None:
        """Allocate host and device memory to work on."""
        for _ in range(2):
            self._take_host()
            self._take_remote()

    def extend(self) -> None:
        """Draw one more action, and add it after the waits that it needs."""
        actions = {
            self._take_host: 2 if len(self._host) < _MAX_LIVE else 0,
            self._take_remote: 3 if len(self._remote) < _MAX_LIVE else 0,
            self._write: 3,
            self._copy: 10,
            self._compute: 4,
            self._read: 2,
            self._free: 1,
            self._idle: 1,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()

    def finish(self) -> None:
        """Read all memory through the host, then free all of it in random order."""
        for name in [*self._remote]:
            self._copy_whole_out(name)
        for name, take in self._host.items():
            self._put(Read(MemoryRange(name, 0, take.numel)))
        for name in self.random.sample([*self._host, *self._remote], len(self._host) + len(self._remote)):
            self._put(Free(name))

    def _put(self, step: Step) -> None:
        for need in reversed(steps_in(self._order.missing(step, patient=True))):
            if self._order.missing(step, patient=True) >> need & 1:
                self._wait_for(need, step)
        self._add(step)

    def _wait_for(self, need: int, step: Step) -> None:
        events = [event for event, past in self._order.events.items() if past >> need & 1]
        event = self.random.choice(events) if events and self.random.random() < 0.5 else self._record(need)
        lane = self._lane_that_waits(need, step)
        self._add(Wait(lane, event))

    def _record(self, need: int) -> str:
        # On the stream that the step ran on, or on any stream that it precedes.
        knowing = [lane for lane in sorted(self._order.lanes) if self._order.past(lane) >> need & 1]
        ran_on = self.steps[need]
        lane = ran_on.lane if isinstance(ran_on, Copy | Compute) else self.random.choice(knowing)
        if self.random.random() < 0.2:
            lane = self.random.choice(knowing)
        return self._event(lane)

    def _event(self, lane: StreamName) -> str:
        event = self._name("e")
        self._add(Record(lane, event))
        return event

    def _lane_that_waits(self, need: int, step: Step) -> StreamName | None:
        if isinstance(step, Copy | Compute):
            return None if self.random.random() < 0.1 else step.lane
        owner = self._remote[step.name].owner if isinstance(step, Free) and step.name in self._remote else None
        # Memory may be freed once the host has waited for its copies, and its owner for its computations.
        return None if isinstance(self.steps[need], Copy) or self.random.random() < 0.3 else owner

    def _add(self, step: Step) -> None:
        self._order.add(step)
        self.steps.append(step)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _lane(self, device: int | None = None, stream: str | None = None) -> StreamName:
        where = self.random.randrange(self.devices) if device is None else device
        return StreamName(where, stream or self.random.choice(STREAMS))

    def _take(self, kind: str, owner: StreamName | None) -> Allocate:
        return Allocate(self._name(kind), self.random.randint(1, _MAX_NUMEL), owner)

    def _take_host(self) -> None:
        take = self._take("h", None)
        self._add(take)
        self._add(Write(MemoryRange(take.name, 0, take.numel), self.random.randrange(MODULUS)))
        self._host[take.name] = take

    def _take_remote(self) -> None:
        owner = self._lane()
        take = self._take("d", owner)
        self._add(take)
        whole = MemoryRange(take.name, 0, take.numel)
        sources = [name for name, host in self._host.items() if host.numel >= take.numel]
        lane = owner if self.random.random() < 0.7 else self._lane(owner.device)
        if sources and self.random.random() < 0.7:
            self._put(Copy(lane, whole, self._piece(self.random.choice(sources), take.numel)))
        else:
            self._put(Compute(StreamName(owner.device, "compute"), whole, (), self.random.randrange(50)))
        self._remote[take.name] = take

    def _numel(self, name: str) -> int:
        return (self._host.get(name) or self._remote[name]).numel

    def _piece(self, name: str, numel: int) -> MemoryRange:
        start = self.random.randint(0, self._numel(name) - numel)
        return MemoryRange(name, start, start + numel)

    def _some_of(self, name: str) -> MemoryRange:
        whole = self.random.random() < 0.6
        return self._piece(name, self._numel(name) if whole else self.random.randint(1, self._numel(name)))

    def _write(self) -> None:
        if self._host:
            piece = self._some_of(self.random.choice([*self._host]))
            self._put(Write(piece, self.random.randrange(MODULUS)))

    def _read(self) -> None:
        if self._host:
            self._put(Read(self._some_of(self.random.choice([*self._host]))))

    def _copy(self) -> None:
        if not (self._host and self._remote):
            return
        host, there = self.random.choice([*self._host]), self.random.choice([*self._remote])
        numel = min(self._numel(host), self._numel(there))
        if self.random.random() < 0.4:
            numel = self.random.randint(1, numel)
        here, away = self._piece(host, numel), self._piece(there, numel)
        lane = self._lane(self._device_of(there))
        self._put(Copy(lane, away, here) if self.random.random() < 0.5 else Copy(lane, here, away))

    def _device_of(self, name: str) -> int:
        owner = self._remote[name].owner
        assert owner is not None
        return owner.device

    def _copy_whole_out(self, name: str) -> None:
        take = Allocate(self._name("h"), self._numel(name), None)
        self._add(take)
        self._host[take.name] = take
        whole = MemoryRange(take.name, 0, take.numel)
        self._put(Copy(self._lane(self._device_of(name)), whole, MemoryRange(name, 0, take.numel)))

    def _compute(self) -> None:
        if not self._remote:
            return
        destination = self._some_of(self.random.choice([*self._remote]))
        device = self._device_of(destination.name)
        numel = destination.stop - destination.start
        fitting = [name for name in self._remote if self._device_of(name) == device and self._numel(name) >= numel]
        names = self.random.choices(fitting, k=self.random.randint(0, 2))
        sources = tuple(self._piece(name, numel) for name in names)
        self._put(Compute(StreamName(device, "compute"), destination, sources, self.random.randrange(50)))

    def _free(self) -> None:
        names = [*self._host, *self._remote]
        if names:
            name = self.random.choice(names)
            self._put(Free(name))
            self._host.pop(name, None)
            self._remote.pop(name, None)

    def _idle(self) -> None:
        events = [*self._order.events]
        if not events or self.random.random() < 0.5:
            self._event(self._lane())
        else:
            lane = None if self.random.random() < 0.2 else self._lane()
            self._add(Wait(lane, self.random.choice(events)))
