"""Work in a process with limits: what it yields comes, and what exceeds a limit, crashes or waits is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ENGINE, Program, ended
from rp_strangers.limited import Budget, limited
from rp_trainer.errors import Refused

# One second of processor time is all that a process of these programs gets.
LIMITED = """
import ctypes, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
from rp_trainer.errors import Refused
from rp_strangers.limited import limited

def loop(budget):
    budget.at("a:1")
    yield b"before"
    sum(iter(int, 1))

def fill(budget):
    budget.at("a:2")
    yield b"a" * 10**13

def grow(budget):
    budget.at("a:3")
    text = "a" * 10**6
    while True:
        text += text

def crash(budget):
    budget.at("a:4")
    yield b"before"
    ctypes.string_at(0)

def leave(budget):
    budget.at("a:5")
    os._exit(3)
    yield b""

def abort(budget):
    budget.at("a:6")
    os.write(2, b"memory allocation of 99999 bytes failed")
    os.abort()
    yield b""

for work in (loop, fill, grow, crash, leave, abort):
    try:
        for _ in limited("the work", "do less", work):
            pass
    except Refused as refused:
        print(refused)
"""


@given(messages=st.lists(st.binary(max_size=300), max_size=20))
@settings(max_examples=examples(20), deadline=None)
def test_messages_come_as_they_were_sent(messages: list[bytes]) -> None:
    assert list(limited("the work", "do less", lambda _: messages)) == messages


def test_messages_larger_than_a_pipe_come_whole() -> None:
    large = os.urandom(5_000_000)

    assert list(limited("the work", "do less", lambda _: [b"", large, b"end"])) == [b"", large, b"end"]


@pytest.mark.slow
def test_what_exceeds_a_limit_or_crashes_is_told_with_its_place_and_what_to_do() -> None:
    code, told, complaints = ended(LIMITED, imports=ENGINE)

    assert (code, complaints) == (0, "")
    loop, fill, grow, crash, leave, abort = told.splitlines()
    assert loop == (
        "a:1: the work must take at most 2 s of processor time up to here, but takes more, perhaps without an "
        "end; do less"
    )
    for line, place in ((fill, "a:2"), (grow, "a:3"), (abort, "a:6")):
        assert line.startswith(f"{place}: the work must take at most ")
        assert line.endswith(" GB of memory, but takes more; do less")
    assert crash == "a:4: the work crashed (SIGSEGV); do less"
    assert leave == "a:5: the work crashed (exit code 3); do less"


def test_what_the_work_refuses_is_refused_here() -> None:
    def refuse(_: Budget) -> Iterator[bytes]:
        yield b"one"
        raise Refused("no \u202e")

    messages = limited("the work", "do less", refuse)

    assert next(messages) == b"one"
    with pytest.raises(Refused, match="no \u202e"):
        next(messages)


def test_an_error_that_nobody_expects_comes_with_its_traceback() -> None:
    def fail(_: Budget) -> Iterator[bytes]:
        yield b"one"
        raise KeyError("why")

    with pytest.raises(RuntimeError, match=r"in fail\n(.*\n)+KeyError: 'why'"):
        list(limited("the work", "do less", fail))


def test_what_the_work_writes_is_written_here_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    def write(_: Budget) -> Iterator[bytes]:
        os.write(1, b"by C code\n")
        os.write(2, b"by other C code\n")
        yield b""

    list(limited("the work", "do less", write))

    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "by C code\nby other C code\n")


def test_more_work_may_take_longer() -> None:
    def limits(budget: Budget) -> Iterator[bytes]:
        import resource

        for nbytes in (0, 2_000_000):
            budget.allow("a", nbytes)
            yield b"%d" % resource.getrlimit(resource.RLIMIT_CPU)[0]

    first, second = map(int, limited("the work", "do less", limits))

    assert second - first == 100


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_whose_messages_nobody_takes_any_more_is_ended() -> None:
    def endless(_: Budget) -> Iterator[bytes]:
        while True:
            yield b"%d" % os.getpid()

    messages = limited("the work", "do less", endless)
    pid = int(next(messages))
    assert is_running(pid)

    messages.close()

    assert not is_running(pid)


def test_a_limited_process_ends_with_the_one_that_started_it() -> None:
    code = """
import os, sys, time
from rp_strangers.limited import limited
def wait(budget):
    yield b"%d" % os.getpid()
    time.sleep(1000)
messages = limited("the work", "do less", wait)
sys.stderr.write(next(messages).decode() + "\\n")
sys.stderr.flush()
next(messages)
"""
    with Program(code, imports=ENGINE) as program:
        pid = int(program.stderr.readline())
        os.kill(program.pid, signal.SIGKILL)
        program.end()

    # It is another's child by now: nobody here waits for it, and the system ends it at once.
    while is_running(pid):
        os.sched_yield()


def test_connections_of_the_first_process_are_none_of_the_limited_one() -> None:
    reader, writer = os.pipe()

    def wait(_: Budget) -> Iterator[bytes]:
        yield b""
        while True:
            os.sched_yield()

    messages = limited("the work", "do less", wait)
    next(messages)
    os.close(writer)

    assert os.read(reader, 1) == b""
    os.close(reader)
    messages.close()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_work_that_waits_for_what_does_not_come_is_ended() -> None:
    def wait(budget: Budget) -> Iterator[bytes]:
        budget.at("a:1")
        os.read(os.pipe()[0], 1)
        yield b""

    with pytest.raises(Refused, match="a:1: the work must come to an end, but waits; do less"):
        list(limited("the work", "do less", wait))
