"""Opening: machines that do not come, end meanwhile or do not fit are named, on all others, in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ranks

PROGRAM = """
import threading
from rp_dist.opening.opening import Opening

def then(act, name):
    true = getattr(Opening, name)
    def changed(*args):
        act()
        return true(*args)
    setattr(Opening, name, changed)

{before}
begin = time.monotonic()
try:
    with Machines.open(connections=1, timeout_s=TIMEOUT_S) as machines:
        {inside}
    found = ["opened", None, ""]
except rp_dist.DistError as error:
    found = [type(error).__name__, getattr(error, "rank", None), str(error)]
tell([*found, time.monotonic() - begin])
"""
TIMEOUT_S = 2.0
# Where what is found does not wait for it: busy machines may need it to open.
LONG_S = 10.0
LATE_S = 2.0


def attempt(
    before: str,
    inside: str = "pass",
    size: int = 3,
    silent: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list:
    """What each rank but the silent one found: the error, the rank that it names, its text."""
    code = f"TIMEOUT_S = {timeout_s}\n" + PROGRAM.format(before=before, inside=inside)
    with ranks(code, size) as running:
        found = [running.hear(rank) for rank in range(size) if rank != silent]
        assert max(each[3] for each in found) < timeout_s + LATE_S
        return [tuple(each[:3]) for each in found]


@pytest.mark.parametrize("silent", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_machine_that_does_not_come_is_named(silent: int) -> None:
    found = attempt(f"if rank == {silent}: os._exit(0)", silent=silent)
    assert [each[:2] for each in found] == [("MachineLost", silent)] * 2, found


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ("groups", "SIGKILL"),
        pytest.param("groups", "SIGSTOP", marks=pytest.mark.nightly),
        pytest.param("meet", "SIGKILL", marks=pytest.mark.nightly),
        pytest.param("meet", "SIGSTOP", marks=pytest.mark.nightly),
    ],
)
def test_a_machine_that_is_lost_while_opening_is_named(moment: str, name: str) -> None:
    act = f"then(lambda: os.kill(os.getpid(), signal.{name}), '{moment}')"
    found = attempt(f"if rank == 1: {act}", silent=1)
    assert [each[:2] for each in found] == [("MachineLost", 1)] * 2, found


FORGOTTEN = """
from rp_dist.blocks import link
from rp_dist.blocks.wire import Wire
if rank == 1:
    link._pass_round = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Wire.wait = lambda *_: threading.Event().wait()
"""


def test_a_machine_that_is_lost_while_the_link_is_measured_is_named_whatever_gloo_forgets() -> None:
    found = attempt(FORGOTTEN, silent=1, timeout_s=LONG_S)
    assert [each[:2] for each in found] == [("MachineLost", 1)] * 2, found


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["meet", "groups", "_complete"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_rank_0_that_is_lost_while_opening_is_named(moment: str, name: str) -> None:
    act = f"then(lambda: os.kill(os.getpid(), signal.{name}), '{moment}')"
    found = attempt(f"if rank == 0: {act}", silent=0)
    assert [each[:2] for each in found] == [("MachineLost", 0)] * 2, found


def test_settings_that_differ_are_found_on_all() -> None:
    found = attempt("TIMEOUT_S += rank == 1")
    text = "machines do not run the same: timeout_s is 2.0 on ranks 0, 2 but 3.0 on rank 1"
    assert found == [("Disagreement", None, text)] * 3


def test_facts_that_differ_are_found_on_all() -> None:
    found = attempt("", "machines.agree({'layers': 3 + rank, 'seed': 1})", size=2)
    text = "machines do not run the same: layers is 3 on rank 0 but 4 on rank 1"
    assert found == [("Disagreement", None, text)] * 2


def test_a_number_of_machines_that_differs_is_found() -> None:
    found = attempt("if rank == 1: os.environ['WORLD_SIZE'] = '3'", size=2)
    text = "rank 1 was started as one of 3 machines, but rank 0 as one of 2; all need the same WORLD_SIZE"
    assert [each[:2] for each in found] == [("Disagreement", None)] * 2
    assert all(each[2].startswith(text) for each in found)


@pytest.mark.parametrize("rank", [-1, 9])
def test_a_rank_that_does_not_exist_is_named_on_both_sides(rank: int) -> None:
    found = attempt(f"if rank == 1: os.environ['RANK'] = '{rank}'", size=2)
    words = f"was started as rank {rank}, but 2 machines (WORLD_SIZE) have the ranks 0 to 1; give it one of these"
    assert [each[:2] for each in found] == [("Disagreement", None)] * 2
    assert all(words in each[2] for each in found), found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [-1, 9])
def test_a_rank_that_does_not_exist_is_named_where_nobody_else_is(rank: int) -> None:
    before = f"if rank == 0: os._exit(0)\nos.environ['RANK'] = '{rank}'"
    found = attempt(before, size=2, silent=0)
    assert found[0][0] == "Disagreement"
    assert f"was started as rank {rank}, but 2 machines (WORLD_SIZE) have the ranks 0 to 1" in found[0][2]


@pytest.mark.parametrize("twice", [0, 1])
def test_a_rank_that_was_started_twice_is_named_on_all(twice: int) -> None:
    found = attempt(f"if rank == 2: os.environ['RANK'] = '{twice}'")
    told_it = [each for each in found if f"rank {twice} was started twice, as process" in each[2]]
    # Whoever comes after the end of this opening finds nobody.
    assert len(told_it) >= 2, found
    assert all(each[0] == "Disagreement" for each in told_it)
    assert all("give each a MASTER_PORT of its own" in each[2] for each in told_it)


def test_two_ranks_0_alone_name_each_other_and_no_machine_that_did_not_come() -> None:
    found = attempt("os.environ['RANK'] = '0'", size=2)
    assert [each[0] for each in found] == ["Disagreement"] * 2
    assert all("rank 0 was started twice, as process" in each[2] for each in found)


def test_a_port_that_another_program_has_is_named() -> None:
    before = (
        "import socket\nother = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])), backlog=0)"
    )
    before = f"{before.replace('other', 'if rank == 0: other')}\nif rank: os._exit(0)"
    # Half of the time is for the answer that never comes.
    found = attempt(before, size=2, silent=1, timeout_s=6.0)
    assert found[0][0] == "InvalidTransfer"
    assert "is in use by another program" in found[0][2]


def test_an_error_that_comes_just_after_the_time_is_told_all_the_same() -> None:
    late = """
from rp_dist.opening import opening
def shown(*_):
    time.sleep(TIMEOUT_S + 0.1)
    raise rp_dist.InvalidTransfer("said late")
opening.Board.replace = shown
"""
    found = attempt(f"{late}\nif rank: os._exit(0)", size=2, silent=1, timeout_s=1.0)
    assert found[0][::2] == ("InvalidTransfer", "said late")


@pytest.mark.parametrize(("size", "port"), [(0, 29500), (2, 0), (2, 70000)])
def test_a_place_that_cannot_be_is_refused(size: int, port: int) -> None:
    found = attempt(f"os.environ.update(WORLD_SIZE='{size}', MASTER_PORT='{port}')", size=1)
    assert found[0][0] == "InvalidTransfer"
    assert "WORLD_SIZE must be 1 or more and MASTER_PORT 1 to 65535" in found[0][2]


@pytest.mark.slow
def test_a_machine_with_another_secret_is_named_on_both_sides() -> None:
    found = attempt("os.environ['ROUNDPIPE_SECRET'] = 'a secret of rank ' + str(rank)", size=2)
    assert found[1][0] == "Disagreement"
    assert "has another secret than this one; ROUNDPIPE_SECRET" in found[1][2]
    assert found[0][:2] == ("MachineLost", 1)
    assert (
        "it did not come within 2 s; a connection from 127.0.0.1 was dropped: it knows another secret"
        in found[0][2]
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_secret_that_only_one_machine_has_is_named_on_both_sides(rank: int) -> None:
    found = attempt(f"if rank == {rank}: os.environ['ROUNDPIPE_SECRET'] = 'a secret of one alone'", size=2)
    assert "must be the same on all machines, or set on none" in found[1][2]
    assert "it knows another secret, or none" in found[0][2]


def test_machines_with_one_secret_open_and_never_write_it_into_torchs_store() -> None:
    before = """
os.environ['ROUNDPIPE_SECRET'] = 'one secret of all machines'
from rp_dist.opening.rendezvous import Rendezvous
true_text = Rendezvous.text
Rendezvous.text = lambda card: tell(true_text(card)) or true_text(card)
"""
    with ranks(f"TIMEOUT_S = 20\n{PROGRAM.format(before=before, inside='pass')}", 2) as running:
        card = running.hear(0)
        while isinstance(found := running.hear(0), str):
            assert found == card
        assert found[0] == running.hear(1)[0] == "opened"
        assert str(card).endswith(" -")


def test_without_a_secret_anybody_can_read_one_who_reaches_torchs_store() -> None:
    before = """
from rp_dist.opening.rendezvous import Rendezvous
true_text = Rendezvous.text
Rendezvous.text = lambda card: tell(true_text(card)) or true_text(card)
"""
    with ranks(f"TIMEOUT_S = 20\n{PROGRAM.format(before=before, inside='pass')}", 2) as running:
        secret = str(running.hear(0)).split()[-1]

        assert len(bytes.fromhex(secret)) == 32


@pytest.mark.slow
def test_a_machine_of_another_version_is_named_on_both_sides() -> None:
    before = "if rank:\n    from rp_dist.links import handshake\n    handshake.VERSION = 2"
    before += "\n    from rp_dist.opening import rendezvous\n    rendezvous.VERSION = 1"
    found = attempt(before, size=2)
    assert found[1][0] == "Disagreement"
    assert "speaks version 1 of rp-dist's protocol, and this machine version 2" in found[1][2]
    assert "speaks version 2 of rp-dist's protocol, and this machine version 1" in found[0][2]


def test_a_stranger_who_connects_is_ignored() -> None:
    # It finds the port as a scan would: every port of this process that listens.
    before = """
import socket
from rp_dist.control import Control
true_listen = Control.listen
def listen(control, address):
    true_listen(control, address)
    for text in (b"GET / HTTP/1.1\\\\r\\\\n\\\\r\\\\n", b"\\\\0\\\\0\\\\0\\\\x02{}", b"\\\\xff" * 100):
        socket.create_connection(control.place).sendall(text)
Control.listen = listen
""".replace("\\\\", "\\")
    assert [each[0] for each in attempt(before, size=2)] == ["opened"] * 2


def test_an_own_error_reaches_the_others_with_its_reason() -> None:
    mistake = "(_ for _ in ()).throw(rp_dist.DistError('a mistake'))"
    found = attempt("", f"machines.exchange(rank and {mistake})", size=2)
    assert found == [
        ("MachineLost", 1, "rank 1 is lost: it failed: DistError: a mistake"),
        ("DistError", None, "a mistake"),
    ]


def test_without_torchrun_it_says_what_is_missing() -> None:
    found = attempt("del os.environ['RANK']", size=1)
    assert found[0][0] == "InvalidTransfer"
    assert "RANK" in found[0][2]
    assert "torchrun" in found[0][2]


UNDER_TORCHRUN = """
import os, signal
from rp_dist import Machines

with Machines.open(connections=1, timeout_s=30) as machines:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and machines.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print("every rank:", machines.exchange(machines.rank), flush=True)
"""


@pytest.mark.nightly
def test_torchrun_starts_the_machines_and_starts_them_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command += ["--max-restarts", "1", str(program)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("every rank: [0, 1]") == 2
