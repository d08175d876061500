"""One machine dies, hangs, loses its link or fails at some moment: all others name it, in time, and end."""

from __future__ import annotations

import signal
import threading

import pytest
from processes import ranks
from rp_dist.control import Control

TIMEOUT_S = 2.0
# Of a machine that is busy with other tests.
LATE_S = 1.5
# What every rank does at the moment of the fault; the last rank is the one that is lost, except where it is said.
MOMENTS = {
    "idle": "machines.exchange(0)",
    "reduce": "machines.reduce(torch.ones(1 << 20), 0, tag=1).wait()",
    "own_reduce": "machines.reduce(torch.ones(1 << 20), 1, tag=1).wait()",
    "gather": "machines.gather(torch.ones(1 << 20), LOST, tag=1).wait()",
    "scatter": "machines.gather(torch.ones(1 << 24), 0, tag=1).wait()",
    "sum": "machines.sum(torch.ones(3))",
    "agree": "machines.agree({'layers': 3})",
    "closing": "machines.close()",
}
PROGRAM = """
LOST = {lost}
import links, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
machines = Machines.open(connections=2, timeout_s={timeout}, chunk_bytes=1 << 16)
warm = torch.ones(1 << 18)
machines.reduce(warm, 0, tag=0).wait()
machines.gather(warm, 0, tag=0).wait()
ports = sum(machines.exchange(links.ports() if rank == LOST else []), [])
if rank != LOST and {takes_part}:
    links.cut(ports)
tell("open")
if rank == LOST:
    signal.sigwait([signal.SIGUSR1])
    {fault}
begin = time.monotonic()
error = None
def attempt():
    global error
    try:
        {moment}
        machines.close()
    except Exception as found:
        error = found
if rank != LOST or {takes_part}:
    attempt()
seconds = time.monotonic() - begin
again = None
try:
    machines.exchange(1)
except Exception as found:
    again = repr(found)
tell([type(error).__name__, getattr(error, "rank", None), str(error), seconds, [again, repr(error)]])
try:
    machines.close()
except rp_dist.DistError:
    pass
tell([thread.name for thread in threading.enumerate() if thread.name.startswith("rp-dist")])
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "cut": "links.cut()",
    "failed": "machines.fail('ValueError: a mistake'); os._exit(1)",
}


def check_fault(fault: str, moment: str, size: int = 3, lost: int | None = None) -> None:
    lost = size - 1 if lost is None else lost
    code = PROGRAM.format(
        lost=lost,
        timeout=TIMEOUT_S,
        fault=FAULTS[fault],
        moment=MOMENTS[moment],
        takes_part=fault == "cut",
    )
    with ranks(code, size) as running:
        assert running.hear_all() == ["open"] * size
        running.send(lost, signal.SIGUSR1)
        others = [rank for rank in range(size) if rank != lost]
        for rank in others:
            kind, named, text, seconds, kept = running.hear(rank)
            assert (kind, named) == ("MachineLost", lost), text
            assert kept[0] == kept[1]
            assert seconds < TIMEOUT_S + LATE_S, text
        assert [running.hear(rank) for rank in others] == [[], []][: len(others)], "threads are left"
        for rank in others:
            status, _, complaints = running.programs[rank].end()
            assert (status, complaints) == (0, "")
        # Who has heard all others take leave has closed, whatever happens then.
        if fault == "cut" and moment != "closing":
            kind, named, _, seconds, _ = running.hear(lost)
            assert (kind, seconds < TIMEOUT_S + LATE_S) == ("MachineLost", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "moment"),
    [("killed", "reduce"), ("stopped", "gather"), ("cut", "scatter"), ("failed", "own_reduce")],
)
def test_the_others_name_the_machine_in_time_and_end(fault: str, moment: str) -> None:
    check_fault(fault, moment)


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_name_the_machine_whatever_they_do(fault: str, moment: str, lost: int) -> None:
    check_fault(fault, moment, lost=lost)


STUCK = """
import threading
machines = Machines.open(connections=1, timeout_s=20, patience_s=1)

begin = time.monotonic()
try:
    if rank == 0:
        CALL
    else:
        threading.Event().wait(2)
        machines.exchange(0)
    tell(None)
except MachineLost as error:
    tell([error.rank, str(error), time.monotonic() - begin])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("machines.exchange(0)", marks=pytest.mark.nightly),
        "machines.reduce(torch.ones(5), 0, tag=0).wait()",
        "machines.close()",
    ],
)
def test_a_machine_that_lives_but_takes_no_part_is_named_when_patience_ends(call: str) -> None:
    with ranks(STUCK.replace("CALL", call), 2) as running:
        assert running.hear(0)[0] == 1
        assert running.hear(1)[0] == 1


LEAVING = """
machines = Machines.open(connections=1, timeout_s=1)
try:
    if rank == 0:
        machines.reduce(torch.ones(5), 0, tag=0).wait()
    machines.close()
    tell(None)
except MachineLost as error:
    tell([error.rank, str(error)])
"""


@pytest.mark.slow
def test_a_machine_that_has_left_is_not_waited_for() -> None:
    with ranks(LEAVING, 2) as running:
        for rank, text in running.hear_all():
            assert rank == 1
            assert "it has closed its machines" in text


def test_the_end_waits_for_the_thread_that_breaks_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(0, 2, 60.0)
    control.start()
    telling, may_tell, may_break = (threading.Event() for _ in range(3))
    order: list[str] = []
    monkeypatch.setattr(control, "tell", lambda _: (telling.set(), may_tell.wait(30)))
    control.ending.on_loss = lambda: (may_break.wait(30), order.append("broken"))
    loses = threading.Thread(target=control.give_up, args=(1, "a test"))
    ends = threading.Thread(target=lambda: (control.end(), order.append("ended")))

    loses.start()
    assert telling.wait(30)
    ends.start()
    ends.join(0.2)
    may_tell.set()
    loses.join()
    may_break.set()
    ends.join()

    assert order == ["broken", "ended"]


ASKED = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
machines = Machines.open(connections=1, timeout_s=20, chunk_bytes=1 << 16)
block = torch.ones(1 << 22)
if rank == 1:
    work = machines.gather(block, 1, tag=0)
    while not machines._lanes["give"]._to_post.empty():
        time.sleep(0.001)
tell("open")
if rank == 0:
    signal.sigwait([signal.SIGUSR1])
    machines.gather(block, 1, tag=0)
    while not machines._lanes["gather"]._to_post.empty():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    work.wait()
    machines.close()
except MachineLost as error:
    tell(error.rank)
try:
    machines.close()
except rp_dist.DistError:
    pass
"""


@pytest.mark.slow
def test_a_machine_that_wakes_when_those_that_asked_are_gone_ends() -> None:
    # Gloo then forgets sends without an error.
    with ranks(ASKED, 2) as running:
        assert running.hear_all() == ["open", "open"]
        running.send(1, signal.SIGSTOP)
        running.send(0, signal.SIGUSR1)
        running.programs[0].end()
        running.send(1, signal.SIGCONT)
        assert running.hear(1) == 0
        assert running.programs[1].end()[::2] == (0, "")


STOPPED = """
machines = Machines.open(connections=1, timeout_s=2)
tell(0)
if rank:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    machines.exchange(0)
    machines.exchange("one that came before the stop may be complete")
except MachineLost as error:
    tell([error.rank, str(error)])
"""


@pytest.mark.slow
def test_a_machine_that_was_given_up_learns_it_when_it_wakes() -> None:
    with ranks(STOPPED, 2) as running:
        assert running.hear_all() == [0, 0]
        assert running.hear(0)[0] == 1
        running.send(1, signal.SIGCONT)
        rank, text = running.hear(1)
        assert rank == 1
        assert text.startswith("rank 1 is lost: the other machines gave this one up: no sign of life for")
