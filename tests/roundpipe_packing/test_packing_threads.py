"""The threads that RoundPipe lends to packing: a core each, ended afterwards, and quick to end after an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from roundpipe.packing_services import PACKING_SERVICES
from rp_packing.piecewise.threads import Scratch, each_piece
from rp_packing.services import lent


def test_importing_roundpipe_lends_them() -> None:
    assert lent() is PACKING_SERVICES


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_pieces_are_worked_on_at_once_with_a_core_each_and_threads_end() -> None:
    # given two pieces that wait for each other
    meeting = threading.Barrier(2, timeout=60)
    seen: dict[int, tuple[threading.Thread, int, int]] = {}

    def body(piece: int, scratch: Scratch) -> None:
        meeting.wait()
        memory = scratch.take("numbers", (8,), torch.float32).data_ptr()
        seen[piece] = threading.current_thread(), torch.get_num_threads(), memory

    # when
    each_piece([0, 1], body, torch.empty(0))
    # then
    (one, its_number, its_memory), (other, other_number, other_memory) = seen[0], seen[1]
    assert one is not other
    assert (its_number, other_number) == (1, 1)
    assert its_memory != other_memory
    assert not one.is_alive()
    assert not other.is_alive()
    assert torch.get_num_threads() == 2
    inherited: list[int] = []
    later = threading.Thread(target=lambda: inherited.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert inherited == [2]


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_piece_is_raised_and_ends_the_others() -> None:
    begun: list[int] = []

    def body(piece: int, _: Scratch) -> None:
        begun.append(piece)
        raise IndexError("a piece that fails")

    with pytest.raises(IndexError, match="a piece that fails"):
        each_piece(range(1000), body, torch.empty(0))
    assert len(begun) <= 2
