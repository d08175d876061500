"""One machine alone: what it shares comes back as it is, and each mistake is refused at the call that makes it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from processes import free_port
from rp_dist import Closed, InvalidTransfer, MachineLost, Machines
from rp_dist.blocks.work import Work
from strangers import ports


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun gives to one machine alone."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def alone(place: None) -> Iterator[Machines]:  # noqa: ARG001 - machines open there
    with Machines.open(timeout_s=30) as machines:
        yield machines


def test_values_and_blocks_come_back_as_they_are(alone: Machines) -> None:
    block, bits = torch.randn(1000).bfloat16(), torch.arange(10)
    kept, total = block.clone(), torch.full((1000,), torch.nan)

    alone.agree({"version": 3})
    works = [alone.reduce(block, 0, tag=0, out=total), alone.gather(bits, 0, tag=0)]
    works.append(alone.pass_on(bits, 0, 0, tag=1))
    works.append(alone.reduce(block[:0], 0, tag=2))
    for work in works:
        work.wait()

    assert alone.exchange([1, "x"]) == [[1, "x"]]
    assert torch.equal(alone.sum(torch.tensor([[1.5, 2.0]])), torch.tensor([[1.5, 2.0]]))
    assert torch.equal(block, kept)
    assert torch.equal(total, kept.float())
    assert torch.equal(bits, torch.arange(10))
    assert all(work.done() and work.ended_s >= work.launched_s for work in works)
    assert (alone.sent_bytes, alone.received_bytes, alone.network_gb_s) == (0, 0, math.inf)
    assert (alone.rank, alone.size, alone.connections) == (0, 1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's tables")
@pytest.mark.usefixtures("alone")
def test_one_machine_opens_no_port_that_others_reach() -> None:
    assert all(host == "127.0.0.1" for host, _ in ports(os.getpid()))


@pytest.mark.parametrize(
    ("block", "owner", "tag", "said"),
    [
        (torch.zeros(4, 4), 0, 0, r"one dimension in host memory, but it is \(4, 4\)"),
        (torch.zeros(8)[::2], 0, 0, "contiguous"),
        (torch.zeros(4, device="meta"), 0, 0, "on meta instead"),
        (torch.zeros(4), 1, 0, "rank 1, tag 0 instead"),
        (torch.zeros(4), 0, -1, "rank 0, tag -1 instead"),
    ],
)
def test_a_block_that_cannot_be_carried_is_refused(
    alone: Machines, block: torch.Tensor, owner: int, tag: int, said: str
) -> None:
    for call in (alone.reduce, alone.gather):
        with pytest.raises(InvalidTransfer, match=said):
            call(block, owner, tag=tag)


@pytest.mark.parametrize(
    ("block", "out", "said"),
    [
        (torch.zeros(4, dtype=torch.int64), None, "dtype is torch.int64"),
        (torch.zeros(4), torch.zeros(5), r"out must be .* but is \(5,\)"),
        (torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.float64), "but is .* torch.float64"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "on meta instead"),
    ],
)
def test_a_sum_that_has_no_place_is_refused(
    alone: Machines, block: torch.Tensor, out: torch.Tensor | None, said: str
) -> None:
    with pytest.raises(InvalidTransfer, match=said):
        alone.reduce(block, 0, tag=0, out=out)


def test_a_channel_below_zero_is_refused(alone: Machines) -> None:
    with pytest.raises(InvalidTransfer, match="channel must be >= 0, but is -2"):
        alone.exchange(None, channel=-2)


@pytest.mark.usefixtures("place")
def test_closed_machines_take_nothing_more_and_open_again() -> None:
    machines = Machines.open(connections=2, timeout_s=30)
    assert machines.connections == 2

    machines.close()
    machines.close()

    with pytest.raises(Closed):
        machines.exchange(1)
    with pytest.raises(Closed):
        machines.gather(torch.zeros(1), 0, tag=0)
    assert not dist.is_initialized()
    with Machines.open(timeout_s=30) as again:
        assert again.exchange(2) == [2]


@pytest.mark.usefixtures("place")
def test_an_error_inside_closes_the_machines_and_is_raised_as_itself() -> None:
    with pytest.raises(ZeroDivisionError), Machines.open(timeout_s=30) as machines:
        raise ZeroDivisionError
    with pytest.raises(MachineLost, match="ZeroDivisionError"):
        machines.exchange(1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("setting", [{"timeout_s": 0}, {"chunk_bytes": 7}, {"connections": 0}])
@pytest.mark.usefixtures("place")
def test_settings_out_of_range_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(InvalidTransfer, match="timeout_s must be > 0, chunk_bytes >= 8 and connections >= 1"):
        Machines.open(**setting)  # pyright: ignore[reportArgumentType] - a mistake


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", None), ("RANK", "first")])
@pytest.mark.usefixtures("place")
def test_without_torchruns_variables_the_error_names_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    found = "not set" if value is None else repr(value)
    words = f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.*but {name} is {found}"
    with pytest.raises(InvalidTransfer, match=words):
        Machines.open(timeout_s=5)


# One transfer


def test_a_transfer_that_failed_raises_its_own_error_unless_a_machine_is_lost() -> None:
    work = Work(lambda: None)
    work.finish(KeyError("first"))
    work.finish()
    with pytest.raises(KeyError, match="first"):
        work.wait()


def test_a_transfer_that_never_ends_is_given_up_a_moment_after_a_machine_is_lost() -> None:
    def raise_loss() -> None:
        raise MachineLost(3, "gone")

    with pytest.raises(MachineLost, match="rank 3"):
        Work(raise_loss).wait()


def test_a_transfer_that_ends_in_the_moment_after_a_loss_raises_nothing() -> None:
    def raise_loss() -> None:
        work.finish()
        raise MachineLost(3, "gone")

    work = Work(raise_loss)
    work.wait()
