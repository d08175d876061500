"""Ctrl-C wherever it can come, at random times and at each instruction: nothing hangs, numbers stay right."""

from __future__ import annotations

import dis
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import interrupting
import pytest
import roundpipe
import rp_checkpoint
import rp_engine
import rp_optim
import rp_transfer
from examples import dear
from interrupting import Trained
from plain import batch, square_error
from roundpipe import Runtime

pytestmark = [pytest.mark.untraced, pytest.mark.usefixtures("small_departures")]
NIGHTLY = int(os.environ.get("ROUNDPIPE_INTERRUPTS", "10000"))
PACKAGES = (roundpipe, rp_checkpoint, rp_engine, rp_optim, rp_transfer)
OURS = tuple(str(Path(package.__file__).parent) for package in PACKAGES)


# Python swallows an interrupt that comes while a finalizer runs, as where a tensor ends, and says so.
SWALLOWED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@SWALLOWED
@pytest.mark.timeout(120)
@pytest.mark.parametrize("devices", ["cpu:2", pytest.param("cpu:4", marks=pytest.mark.slow)])
def test_interrupts_at_random_times_hang_nothing_and_leave_right_numbers(devices: str) -> None:
    figures = interrupting.run(devices, 25)
    assert figures.interrupts == 25


@SWALLOWED
@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("devices", ["cpu:2", "cpu:4"])
def test_thousands_of_interrupts_hang_nothing_and_leave_right_numbers(devices: str) -> None:
    figures = interrupting.run(devices, NIGHTLY)
    assert figures.interrupts == NIGHTLY
    assert figures.slowest_s < 5


# At each instruction in turn


class Planned(KeyboardInterrupt):
    """The interrupt of a test."""


# After these the interpreter looks whether a signal has come, and at no others.
_LOOKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}


def points(code: CodeType) -> set[int]:
    """The offsets before which an interrupt is raised: those behind an instruction after which signals are seen.

    Only where the same handlers hold for both: an interrupt is raised at the instruction before.
    """
    found: set[int] = set()
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> list[int]:
        return [entry.target for entry in handlers if entry.start <= offset < entry.end]

    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if (
            before is not None
            and before.opname in _LOOKS
            and handler(before.offset) == handler(instruction.offset)
        ):
            found.add(instruction.offset)
        before = instruction
    return found


def finalizes(frame: FrameType | None) -> bool:
    """Whether it runs because something has gone."""
    while frame is not None:
        if frame.f_code is weakref.finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


class Sweep:
    """Raises at the nth point that the calling thread comes to in our own code."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.raised_at: str | None = None
        self._points: dict[CodeType, set[int]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        # Python swallows what comes in a finalizer, ours or not, and says so on standard error.
        if not frame.f_code.co_filename.startswith(OURS) or finalizes(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in self._of(frame.f_code):
            self.left -= 1
            if self.left < 0 and self.raised_at is None:
                self.raised_at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise Planned
        return self

    def _of(self, code: CodeType) -> set[int]:
        if code not in self._points:
            self._points[code] = points(code)
        return self._points[code]


def sweep(call: Callable[[], object], nth: int) -> str | None:
    """Call with an interrupt at the nth point; where that was, None if the call has fewer."""
    tracer = Sweep(nth)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except Planned:
        pass
    finally:
        sys.settrace(before)
    return tracer.raised_at


def within(seconds: float, call: Callable[[], object]) -> None:
    """A call that may hang, on another thread."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


WAYS = (
    "forward_backward",
    "forward and backward",
    "a step",
    "a synchronous step",
    "synchronize",
    "zero_grad",
    "reset",
    "load_state_dict",
)


def ways(trained: Trained) -> dict[str, Callable[[], object]]:
    """What a training loop does."""
    model, (x, y) = trained.model, batch(6)

    def backward() -> None:
        square_error(model(x), y).backward()

    return {
        "forward_backward": lambda: model.forward_backward((x,), None, y, square_error),
        "forward and backward": backward,
        "a step": lambda: model.step(trained.update),
        "a synchronous step": lambda: model.step(trained.update, is_async=False),
        "synchronize": model.synchronize,
        "zero_grad": model.zero_grad,
        "reset": model.reset,
        "load_state_dict": lambda: model.load_state_dict(model.state_dict()),
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", WAYS)
def test_an_interrupt_at_any_instruction_of_a_call_hangs_nothing(two: Runtime, what: str) -> None:
    trained = Trained(two)
    model, (x, y) = trained.model, batch(6)
    call, seen = ways(trained)[what], set[str]()
    trained.steps()
    nth = 0
    while True:
        model.forward_backward((x,), None, y, square_error)
        if (where := sweep(call, nth)) is None:
            break
        seen.add(where)
        within(20, model.reset)
        # Every one under the thorough profile.
        nth += (1 if nth < 400 else 7) * (100 // dear(100))
    within(20, model.reset)
    within(20, model.synchronize)
    assert len(seen) > 5
    wanted = trained.wanted()
    within(20, trained.steps)
    assert trained.which(wanted) == 3
