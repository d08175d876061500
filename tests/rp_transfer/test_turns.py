"""Turns: whatever the interleaving, history equals the order in which the tickets were taken."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import dataclass, field

import pytest
import torch
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from rp_transfer import CpuBackend, Ticket, Turns
from rp_transfer.testing.timeout import bounded


def test_readers_stand_beside_each_other_and_a_writer_alone() -> None:
    line = Turns()
    first, second, writer, third = line.read(), line.read(), line.write(), line.read()
    assert (first.open(), second.open(), writer.open(), third.open()) == (True, True, False, False)
    for ticket in (first, second):
        ticket.enter()
        ticket.leave()
    assert (writer.open(), third.open()) == (True, False)
    writer.enter()
    writer.leave()
    assert third.open()


def test_a_ticket_left_unentered_stands_aside() -> None:
    line = Turns()
    first, second, third = line.write(), line.write(), line.write()
    second.leave()
    assert not third.open()
    first.enter()
    first.leave()
    assert third.open()


def test_a_ticket_that_was_left_is_not_entered() -> None:
    line = Turns()
    ticket = line.write()
    ticket.leave()
    with pytest.raises(RuntimeError, match="was left"):
        ticket.enter()


def test_leaving_twice_changes_nothing() -> None:
    line = Turns()
    ticket = line.write()
    ticket.enter()
    ticket.leave()
    ticket.leave(CpuBackend(1).devices[0].compute.record())
    assert ticket.over()


def test_a_use_is_over_when_its_events_have_happened() -> None:
    stream = CpuBackend(1).devices[0].weights_in
    stream.copy(there := torch.empty(3), source := torch.ones(3))
    ticket = Turns().write()
    assert not ticket.over()
    ticket.enter(stream)
    ticket.leave(event := stream.record())
    assert not ticket.over()
    event.synchronize()
    assert ticket.over()
    assert torch.equal(there, source)


@pytest.mark.parametrize("holder", ["read", "write"])
def test_a_holder_that_fails_on_its_stream_hides_no_writer_before_it(holder: str) -> None:
    # Its stream waited, but nobody will ever wait for that stream: those behind need the writer's own event.
    backend = CpuBackend(1)
    device, line = backend.devices[0], Turns()
    block = backend.host_empty((3,), torch.float32)
    writer, failing, last = line.write(), getattr(line, holder)(), line.write()
    there = device.empty((3,), torch.float32, stream=device.results_out)
    writer.enter(device.results_out)
    device.results_out.copy(block, there)
    writer.leave(device.results_out.record())
    failing.enter(device.weights_in)
    failing.leave()
    last.enter()
    backend.host_touch(write=[block])
    last.leave()


def test_entering_on_the_host_blocks_until_the_one_before_has_left() -> None:
    line, entered = Turns(), threading.Event()
    first, second = line.write(), line.write()

    def enter() -> None:
        second.enter()
        entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not entered.is_set()
    first.enter()
    assert not entered.is_set()
    first.leave()
    assert entered.wait(10)
    thread.join(10)


def living_tickets() -> int:
    """All tickets of the process, those of other tests' lines included."""
    gc.collect()
    return sum(type(thing) is Ticket for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("on_stream", [True, False])
def test_a_line_of_a_thousand_turns_keeps_no_old_tickets(on_stream: bool) -> None:
    stream, line, before = CpuBackend(1).devices[0].compute, Turns(), living_tickets()
    for index in range(1000):
        tickets = [line.write(), line.read(), line.read()]
        for ticket in tickets:
            ticket.enter(stream if on_stream else None)
            ticket.leave(stream.record())
        if index % 10 == 0:
            line.read().leave()
    stream.record().synchronize()
    del tickets, ticket
    assert living_tickets() - before < 20


def test_readers_that_nobody_writes_after_are_forgotten() -> None:
    line, before = Turns(), living_tickets()
    for index in range(1000):
        ticket = line.read()
        if index % 2:
            ticket.enter()
        ticket.leave()
    del ticket
    assert living_tickets() - before < 20


def test_a_long_row_of_tickets_left_unentered_is_walked_once() -> None:
    # Each stands behind all before it; walking every path would never end.
    line = Turns()
    for _ in range(60):
        for ticket in (line.read(), line.read(), line.write()):
            ticket.leave()
    last = line.write()
    assert bounded(last.open, seconds=10)
    bounded(last.enter, seconds=10)


@dataclass(frozen=True)
class Job:
    """One use of each of some lines, in launch order; a skipped one leaves without entering."""

    number: int
    uses: dict[int, str]
    skipped: bool
    on_device: bool


@dataclass
class House:
    """Lines of host memory on a strict backend, which sees to it that every use is waited for."""

    devices: int
    num_lines: int
    backend: CpuBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = CpuBackend(self.devices)
        self.lines = [Turns() for _ in range(self.num_lines)]
        self.blocks = [self.backend.host_empty((1,), torch.int64).zero_() for _ in range(self.num_lines)]
        self.seen: dict[tuple[int, int], int] = {}
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()

    def work(self, device: int, jobs: list[tuple[Job, dict[int, Ticket]]]) -> None:
        try:
            for job, tickets in jobs:
                self._do(device, job, tickets)
        except BaseException as error:
            self.errors.append(error)
            for _, tickets in jobs:
                for ticket in tickets.values():
                    ticket.leave()

    def _do(self, device: int, job: Job, tickets: dict[int, Ticket]) -> None:
        for line, ticket in tickets.items():
            if job.skipped:
                ticket.leave()
            elif job.on_device:
                self._on_device(device, job, line, ticket)
            else:
                self._on_host(job, line, ticket)

    def _on_host(self, job: Job, line: int, ticket: Ticket) -> None:
        ticket.enter()
        block = self.blocks[line]
        if job.uses[line] == "write":
            self.backend.host_touch(write=[block], what=f"{job}")
            block.fill_(job.number)
        else:
            self.backend.host_touch(read=[block], what=f"{job}")
            self._note(job, line, int(block))
        ticket.leave()

    def _on_device(self, device: int, job: Job, line: int, ticket: Ticket) -> None:
        there = self.backend.devices[device]
        stream = there.results_out if job.uses[line] == "write" else there.weights_in
        memory = there.empty((1,), torch.int64, stream=stream)
        if job.uses[line] == "write":
            number = torch.tensor([job.number])
            stream.copy(memory, number)
            ticket.enter(stream)
            stream.copy(self.blocks[line], memory)
            ticket.leave(event := stream.record())
            event.synchronize()
        else:
            ticket.enter(stream)
            stream.copy(memory, self.blocks[line])
            ticket.leave(event := stream.record())
            event.synchronize()
            self._note(job, line, int(memory))

    def _note(self, job: Job, line: int, value: int) -> None:
        with self._lock:
            self.seen[job.number, line] = value


def serial_history(jobs: list[Job]) -> dict[tuple[int, int], int]:
    """What each reader sees when the jobs run one after another."""
    values: dict[int, int] = {}
    seen: dict[tuple[int, int], int] = {}
    for job in (job for job in jobs if not job.skipped):
        for line, kind in job.uses.items():
            if kind == "write":
                values[line] = job.number
            else:
                seen[job.number, line] = values.get(line, 0)
    return seen


def random_jobs(source: random.Random, num_lines: int) -> list[Job]:
    return [
        Job(
            number,
            {
                line: source.choice(["read", "read", "write"])
                for line in sorted(source.sample(range(num_lines), source.randint(1, num_lines)))
            },
            skipped=source.random() < 0.15,
            on_device=source.random() < 0.6,
        )
        for number in range(1, 60)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_threads_in_any_interleaving_see_the_history_of_the_launches(seed: int) -> None:
    source = random.Random(seed)
    house = House(devices=source.choice([1, 2, 4]), num_lines=source.randint(1, 3))
    jobs = random_jobs(source, house.num_lines)
    rows: list[list[tuple[Job, dict[int, Ticket]]]] = [[] for _ in range(house.devices)]
    for job in jobs:
        tickets = {line: getattr(house.lines[line], kind)() for line, kind in job.uses.items()}
        source.choice(rows).append((job, tickets))
    threads = [threading.Thread(target=house.work, args=row, daemon=True) for row in enumerate(rows)]
    for thread in source.sample(threads, len(threads)):
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not house.errors
    assert house.seen == serial_history(jobs)


@dataclass
class Place:
    """What the machine knows of a ticket."""

    number: int
    kind: str
    ticket: Ticket
    entered: str = ""
    left: bool = False
    wrote: bool = False


class TurnsMachine(RuleBasedStateMachine):
    """Readers, writers, prefetches, failing holders and skipped tickets of one line, in any order.

    Every use really copies from or to one block of a strict backend, so a wait that is missing raises `Unordered`.
    """

    tickets = Bundle("tickets")
    inside = Bundle("inside")

    def __init__(self) -> None:
        super().__init__()
        self.backend = CpuBackend(2)
        self.block = self.backend.host_empty((1,), torch.int64).zero_()
        self.line = Turns()
        self.places: list[Place] = []
        self.reads: list[tuple[Place, torch.Tensor]] = []
        self.kept: list[torch.Tensor] = []

    def _may_enter(self, place: Place) -> bool:
        before = self.places[: place.number]
        if place.kind == "read":
            writers = [other.number for other in before if other.kind == "write"]
            before = before[: writers[-1] + 1] if writers else []
        return all(other.left for other in before)

    @rule(target=tickets, kind=st.sampled_from(["read", "write"]))
    def take(self, kind: str) -> Place:
        self.places.append(Place(len(self.places), kind, getattr(self.line, kind)()))
        return self.places[-1]

    @precondition(lambda self: self.places)
    @rule(place=consumes(tickets))
    def skip(self, place: Place) -> None:
        place.ticket.leave()
        place.left = True

    @rule(target=inside, place=tickets)
    def prefetch(self, place: Place) -> Place | MultipleResults[Place]:
        if place.left or place.entered or not place.ticket.open():
            return multiple()
        place.entered = "weights_in"
        place.ticket.enter(self.backend.devices[place.number % 2].weights_in)
        return place

    @rule(target=inside, place=consumes(tickets), stream=st.sampled_from(["", "weights_in", "compute"]))
    def enter(self, place: Place, stream: str) -> Place | MultipleResults[Place]:
        if place.left or place.entered:
            return multiple()
        if not self._may_enter(place):
            self.skip(place)
            return place
        device = self.backend.devices[place.number % 2]
        place.ticket.enter(getattr(device, stream) if stream else None)
        place.entered = stream or "host"
        return place

    @rule(place=consumes(inside))
    def fail(self, place: Place) -> None:
        self.skip(place)

    @precondition(lambda self: self.places)
    @rule(place=consumes(inside))
    def use(self, place: Place) -> None:
        if place.left:
            return
        place.wrote = place.kind == "write"
        if place.entered == "host":
            self._use_on_host(place)
        else:
            self._use_on_device(place)
        place.left = True

    def _use_on_host(self, place: Place) -> None:
        if place.wrote:
            self.backend.host_touch(write=[self.block], what=str(place.number))
            self.block.fill_(place.number)
        else:
            self.backend.host_touch(read=[self.block], what=str(place.number))
            self.reads.append((place, self.block.clone()))
        place.ticket.leave()

    def _use_on_device(self, place: Place) -> None:
        stream = getattr(self.backend.devices[place.number % 2], place.entered)
        if place.wrote:
            self.kept.append(torch.tensor([place.number]))
            stream.copy(self.block, self.kept[-1])
        else:
            self.reads.append((place, torch.zeros(1, dtype=torch.int64)))
            stream.copy(self.reads[-1][1], self.block)
        place.ticket.leave(stream.record())

    @invariant()
    def whoever_may_enter_is_let_in(self) -> None:
        for place in self.places:
            if not place.left and not place.entered:
                assert place.ticket.open() == self._may_enter(place)

    @invariant()
    def the_oldest_can_go_on(self) -> None:
        waiting = [place for place in self.places if not place.left]
        assert not waiting or waiting[0].entered or waiting[0].ticket.open()

    def teardown(self) -> None:
        for device in self.backend.devices:
            device.synchronize()
        for place, value in self.reads:
            writers = [other.number for other in self.places[: place.number] if other.wrote]
            assert int(value) == (writers[-1] if writers else 0)


TestTurnsMachine = TurnsMachine.TestCase
TestTurnsMachine.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)
