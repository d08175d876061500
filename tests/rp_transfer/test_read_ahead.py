"""What is read for an upload arrives as announced, whatever was dropped or failed before, in bounded memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_transfer import Conveyor, CpuBackend, Piece

SLOT, ALIGNMENT = 64, 32


class Broken(Exception):
    """What a disk says."""


@dataclass
class Numbers:
    """A source whose bytes are read when they are waited for, as late as possible."""

    data: bytes
    lead: int
    fails: bool = False
    alignment: int = ALIGNMENT
    begun: list[memoryview] = field(default_factory=list[memoryview])
    waits: int = 0

    def begin(self, start: int, stop: int, memory: memoryview) -> Arriving:
        assert len(memory) >= stop - start + 2 * ALIGNMENT
        self.begun.append(memory)
        return Arriving(self, start, stop, memory)


@dataclass
class Arriving:
    """A read under way."""

    source: Numbers
    start: int
    stop: int
    memory: memoryview

    def wait(self) -> int:
        self.source.waits += 1
        if self.source.fails:
            raise Broken
        lead = self.source.lead
        self.memory[lead : lead + self.stop - self.start] = self.source.data[self.start : self.stop]
        return lead


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def announced(backend: CpuBackend, sizes: list[int], seed: int) -> tuple[list[Piece], list[torch.Tensor]]:
    """Pieces in one block on the device, and what each should become."""
    device, generator = backend.devices[0], torch.Generator().manual_seed(seed)
    block = device.empty((sum(sizes),), torch.int16, stream=device.weights_in)
    values = [torch.randint(-9999, 9999, (size,), dtype=torch.int16, generator=generator) for size in sizes]
    pieces: list[Piece] = []
    for index, (part, value) in enumerate(zip(block.split(sizes), values, strict=True)):
        data = bytes(value.untyped_storage().tolist())
        pieces.append((part, Numbers(data, lead=2 * (index % 16))))
    return pieces, values


@settings(max_examples=examples(60), deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=3), min_size=1, max_size=6),
    fates=st.lists(st.sampled_from(["arrives", "dropped", "fails"]), min_size=6, max_size=6),
    ahead=st.integers(1, 6),
)
def test_what_is_announced_arrives(blocks: list[list[int]], fates: list[str], ahead: int) -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    conveyor = Conveyor(backend, device, device.weights_in, chunk_bytes=256, slot_bytes=SLOT)
    coming = [announced(backend, sizes, seed) for seed, sizes in enumerate(blocks)]
    expected = {}

    for index, (pieces, values) in enumerate(coming):
        for later in range(len(expected), min(index + ahead, len(coming))):
            expected[later] = conveyor.announce(coming[later][0])
        mine = expected[index]
        expected[index] = None
        if fates[index] == "fails":
            pieces[-1][1].fails = True
            with pytest.raises(Broken):
                conveyor.upload_read(mine)
        elif fates[index] == "arrives":
            conveyor.upload_read(mine)
            conveyor.record().synchronize()
            for (there, _), value in zip(pieces, values, strict=True):
                assert torch.equal(there, value)
        del mine
    conveyor.drain()
    most = 8 * (SLOT + 3 * ALIGNMENT) + sum(400 for fate in fates if fate == "fails") * 8
    assert backend.host_memory().used_bytes <= most
    backend.close()


def test_the_next_block_is_read_while_this_one_is_copied() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    conveyor = Conveyor(backend, device, device.weights_in, chunk_bytes=256, slot_bytes=SLOT)
    first, second = announced(backend, [40], 0)[0], announced(backend, [200], 1)[0]

    now, later = conveyor.announce(first), conveyor.announce(second)
    conveyor.upload_read(now)

    assert second[0][1].begun
    conveyor.upload_read(later)
    conveyor.drain()
    backend.close()


def test_a_disk_that_failed_is_waited_for_once_and_its_memory_left_to_it() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    conveyor = Conveyor(backend, device, device.weights_in, chunk_bytes=256, slot_bytes=SLOT)
    (first, _), (second, others) = announced(backend, [200], 0), announced(backend, [40], 1)
    broken = first[0][1]
    broken.fails = True

    now, later = conveyor.announce(first), conveyor.announce(second)
    with pytest.raises(Broken):
        conveyor.upload_read(now)
    del now
    conveyor.upload_read(later)
    conveyor.record().synchronize()

    assert torch.equal(second[0][0], others[0])
    assert broken.waits == 1
    mine, theirs = ({address(memory) for memory in source.begun} for source in (second[0][1], broken))
    assert not mine & theirs
    conveyor.drain()
    backend.close()
