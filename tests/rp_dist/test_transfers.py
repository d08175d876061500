"""Blocks and small values between machines, against plain sums and copies in one process."""

from __future__ import annotations

import socket
from collections import deque
from itertools import count
from threading import Thread

import pytest
import torch
from processes import free_port, told
from rp_dist.control import Control
from rp_dist.links.frames import Link
from rp_dist.links.handshake import Keys

REDUCE = """
def part(rank, tag, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + tag)
    return torch.randn(NUMEL[tag], generator=generator).to(dtype)

NUMEL = [1, 7, 1000, 4096, 5001]
found = {}
with Machines.open(connections=CONNECTIONS, timeout_s=20, chunk_bytes=4096) as machines:
    works = []
    for tag, owner in enumerate([size - 1, 0, 1 % size, 0, size - 1]):
        for offset, dtype in ((0, torch.bfloat16), (10, torch.float32), (20, torch.float64), (30, torch.float16)):
            block = part(rank, tag, dtype)
            out = torch.full((NUMEL[tag],), torch.nan) if dtype == torch.bfloat16 and owner == rank else None
            works.append((machines.reduce(block, owner, tag=tag + offset, out=out), block, out, owner, tag, dtype))
    for work, block, out, owner, tag, dtype in works:
        work.wait()
        assert work.done()
        if rank == owner:
            total = part(0, tag, dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
            for other in range(1, size):
                total += part(other, tag, dtype)
            got = block if out is None else out
            assert torch.equal(got, total.to(got.dtype)), (tag, dtype)
        else:
            assert torch.equal(block, part(rank, tag, dtype)), "only the owner's block changes"
    tell("equal")
"""


@pytest.mark.parametrize(("size", "connections"), [(1, 1), (3, 2), pytest.param(4, 1, marks=pytest.mark.nightly)])
def test_a_sum_has_the_bits_of_additions_in_the_order_of_ranks(size: int, connections: int) -> None:
    assert told(REDUCE.replace("CONNECTIONS", str(connections)), size) == ["equal"] * size


COPIES = """
with Machines.open(connections=2, timeout_s=20, chunk_bytes=4096) as machines:
    works = []
    for tag, dtype in enumerate((torch.bfloat16, torch.int64, torch.bool)):
        # Kinds interleave differently on each rank.
        kinds = ["gather", "pass"] if rank % 2 else ["pass", "gather"]
        for kind in kinds:
            block = torch.arange(5001).add(100 * rank).to(dtype)
            if kind == "gather":
                works.append((machines.gather(block, tag % size, tag=tag), block, tag % size, dtype))
            else:
                source = 0 if rank == size - 1 else rank
                works.append((machines.pass_on(block, 0, size - 1, tag=tag), block, source, dtype))
    for work, block, source, dtype in works:
        work.wait()
        assert torch.equal(block, torch.arange(5001).add(100 * source).to(dtype))
    machines.gather(torch.empty(0), 0, tag=99).wait()
    total, last = torch.full((3000,), 1.0), torch.full((3000,), float(rank))
    works = [machines.reduce(total, 0, tag=0), machines.gather(last, size - 1, tag=100)]
assert all(work.done() for work in works), "closing finishes what was launched"
assert last[0] == size - 1 and total[0] == (1 if rank else size)
tell("equal")
"""


@pytest.mark.parametrize("size", [1, 3])
def test_copies_arrive_in_whatever_order_kinds_are_launched(size: int) -> None:
    assert told(COPIES, size) == ["equal"] * size


SMALL = """
import threading
with Machines.open(connections=1, timeout_s=20) as machines:
    values = torch.tensor([0.1, 1e-9, 3.0], dtype=torch.float64) * (rank + 1)
    total = machines.sum(values)
    every = machines.exchange({"rank": rank, "text": "x" * 20000})
    by_channel = {}
    def talk(channel):
        by_channel[channel] = [machines.exchange([channel, step, rank], channel=channel) for step in range(20)]
    threads = [threading.Thread(target=talk, args=(channel,)) for channel in ((1, 2, 3) if rank else (3, 2, 1))]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
    assert by_channel == {c: [[[c, s, r] for r in range(size)] for s in range(20)] for c in (1, 2, 3)}
    machines.agree({"layers": 3, "dtype": "bf16", "seed": None})
    half = machines.sum(torch.ones(2, 1, dtype=torch.float16))
    tell([total.tolist(), [each["rank"] for each in every], half.tolist()])
"""


def test_small_values_are_the_same_on_all_machines_and_channels_do_not_mix() -> None:
    total = sum(
        (torch.tensor([0.1, 1e-9, 3.0], dtype=torch.float64) * (rank + 1) for rank in range(3)), torch.zeros(3)
    )
    expected = [total.tolist(), [0, 1, 2], [[3.0], [3.0]]]
    assert told(SMALL, 3) == [expected] * 3


@pytest.mark.parametrize("moment", [0, 1])
def test_what_is_heard_while_a_channel_is_first_asked_for_is_not_lost(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, (ours, theirs) = count(), socket.socketpair()

    def queue() -> deque[str]:
        # To make one may collect garbage, and then other threads run.
        if next(made) == moment:
            hears = Thread(target=control._handle, args=(Link(ours, Keys(b"", b""), rank=1), ["say", 7, "theirs"]))
            hears.start()
            hears.join()
        return deque()

    monkeypatch.setattr("rp_dist.heard.deque", queue)
    control = Control(0, 2, 60.0)
    control.patience_s = 1.0
    control.start()
    try:
        assert control.exchange("ours", 7) == ["ours", "theirs"]
    finally:
        control.end()
        ours.close()
        theirs.close()


BYTES = """
owned, whole = 3 * 4096, 3 * 4096 * size
with Machines.open(connections=3, timeout_s=20, chunk_bytes=8192) as machines:
    works = [machines.reduce(torch.zeros(owned, dtype=torch.bfloat16), owner, tag=owner) for owner in range(size)]
    [work.wait() for work in works]
    reduced = machines.sent_bytes, machines.received_bytes
    works = [machines.gather(torch.zeros(owned, dtype=torch.bfloat16), owner, tag=owner) for owner in range(size)]
    [work.wait() for work in works]
    tell([reduced, [machines.sent_bytes, machines.received_bytes]])
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_step_sends_and_receives_what_the_arithmetic_says(size: int) -> None:
    whole_bytes = 2 * 3 * 4096 * size
    once = whole_bytes * (size - 1) // size
    assert told(BYTES, size) == [[[once, once], [2 * once, 2 * once]]] * size


AGAIN = """
for connections in (1, None, 2):
    with Machines.open(connections=connections, timeout_s=20) as machines:
        block = torch.full((10,), float(rank))
        machines.gather(block, 1, tag=0).wait()
        assert block[0] == 1 and machines.network_gb_s > 0 and machines.connections >= (connections or 1)
        assert machines.sent_bytes == (40 if rank == 1 else 0)
import torch.distributed as dist
assert not dist.is_initialized()
os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
dist.init_process_group("gloo")
with Machines.open(connections=1, timeout_s=20) as machines:
    assert machines.exchange(rank) == [0, 1]
dist.barrier()
dist.destroy_process_group()
tell("done")
"""


@pytest.mark.slow
def test_machines_open_again_and_beside_a_default_process_group() -> None:
    assert told(AGAIN, 2, OTHER_PORT=str(free_port())) == ["done"] * 2
