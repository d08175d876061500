"""The pool of host memory: to the byte, reused when it is short-lived, given back when it is not."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rp_transfer.host import HostMemory, Slab


class Source:
    """An allocator that counts."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> Slab:
        self.asked.append(nbytes)
        memory = ctypes.create_string_buffer(nbytes)
        return ctypes.addressof(memory), memory


def test_memory_is_asked_for_to_the_byte() -> None:
    source = Source()
    host = HostMemory(source.allocate, 1 << 20)
    kept = [host.empty((n, 3), torch.int16, short_lived=False) for n in (1, 5, 0)]
    assert source.asked == [6, 30]
    assert [tuple(tensor.shape) for tensor in kept] == [(1, 3), (5, 3), (0, 3)]
    assert (host.memory().used_bytes, host.memory().peak_bytes, host.memory().total_bytes) == (36, 36, 1 << 20)
    kept.clear()
    assert (host.memory().used_bytes, host.memory().peak_bytes) == (0, 36)


def test_a_short_lived_buffer_is_used_again_only_when_its_last_tensor_is_gone() -> None:
    source = Source()
    host = HostMemory(source.allocate, 1 << 20)
    first = host.empty((8,), torch.float32, short_lived=True)
    view, address = first[2:], first.data_ptr()
    del first
    second = host.empty((8,), torch.float32, short_lived=True)
    assert second.data_ptr() != address
    del view
    assert host.empty((4, 4), torch.int16, short_lived=True).data_ptr() == address
    assert source.asked == [32, 32]


def test_clearing_gives_back_what_nobody_uses() -> None:
    host = HostMemory(Source().allocate, 1 << 20)
    kept = host.empty((8,), torch.float32, short_lived=True)
    host.empty((8,), torch.int8, short_lived=True)
    host.clear()
    assert host.memory().used_bytes == 32
    del kept
    host.clear()
    assert host.memory().used_bytes == 0


def test_memory_that_cannot_be_had_is_not_counted() -> None:
    def refuse(nbytes: int) -> Slab:
        raise MemoryError(f"no {nbytes} bytes")

    host = HostMemory(refuse, 1 << 20)
    with pytest.raises(MemoryError, match="no 32 bytes"):
        host.empty((8,), torch.float32, short_lived=False)
    assert host.memory().used_bytes == 0


@given(sizes=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_a_pool_never_holds_more_than_was_needed_at_once(sizes: list[tuple[int, bool]]) -> None:
    source = Source()
    host = HostMemory(source.allocate, 1 << 20)
    for numel, short_lived in sizes * 3:
        host.empty((numel,), torch.float32, short_lived=short_lived)
    assert host.memory().used_bytes <= 4 * (1 + 2 + 3 + 4)
