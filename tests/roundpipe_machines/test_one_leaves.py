"""A program that torchrun starts needs to say nothing of machines; one that ends tells the others why."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from on_machines import IMPORTS, environment
from processes import free_port
from programs import Program

_PROGRAM = """
import os, torch
from roundpipe import Runtime
from machine_trainings import batch, row, square_error, wrapped
torch.set_num_threads(1)
with Runtime("cpu:1") as runtime:
    model = wrapped(runtime, row())
    for number in range(3):
        if runtime.group.rank == 1 and number == 1:
            raise ZeroDivisionError("in the training loop")
        x, y = batch(number)
        try:
            model.forward_backward((x,), label=y, loss_fn=square_error)
        except Exception as error:
            print(type(error).__name__, error)
            break
"""


# Nothing is closed: that happens at exit.
_LEFT_OPEN = """
import os, torch
from roundpipe import RoundPipe
from machine_trainings import adamw, batch, row, square_error
torch.set_num_threads(1)
os.environ["ROUNDPIPE_DEVICES"] = "cpu:1"
model = RoundPipe(row(), name="m")
optimizer = adamw(model.optim_parameters())
for number in range(2):
    x, y = batch(number)
    if model.runtime.group.rank == 1 and number == int(os.environ["FAILS_AT"]):
        raise ZeroDivisionError("in the training loop")
    model.forward_backward((x,), label=y, loss_fn=square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=number == 1)
"""


# Machine 1 has no memory left for what the machines have agreed to do.
_OUT_OF_MEMORY = """
import os, torch
from roundpipe import Runtime
from rp_state.gradient import Gradient
from rp_state.block import Block
from machine_trainings import adamw, batch, row, square_error, wrapped
torch.set_num_threads(1)
def fail(*_, **__):
    raise MemoryError("no memory is left")
with Runtime("cpu:1") as runtime:
    model = wrapped(runtime, row(), double_buffer=os.environ["BACK"] == "1")
    optimizer = adamw(model.optim_parameters())
    x, y = batch(0)
    model.forward_backward((x,), label=y, loss_fn=square_error)
    if runtime.group.rank == 1:
        for owner, name in ((Gradient, "to_reduce"), (Block, "write")):
            if name == os.environ["PLACE"]:
                setattr(owner, name, fail)
    try:
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        # With second blocks, machine 1 may have sent all of its weights before: then machine 0 has its step.
        model.forward_backward((x,), label=y, loss_fn=square_error)
        print("no error")
    except Exception as error:
        print(type(error).__name__, error)
"""


# Machine 0 catches its loss's error, and ends in peace, where others are in backward.
_LOSS_FAILS = """
import torch
from roundpipe import Runtime
from machine_trainings import batch, row, square_error, wrapped
torch.set_num_threads(1)
with Runtime("cpu:1") as runtime:
    model = wrapped(runtime, row())
    x, y = batch(0)
    loss = square_error(model(x), y)
    if runtime.group.rank == 1:
        try:
            loss.backward()
        except Exception as error:
            print(type(error).__name__, error, *error.__notes__)
"""


def _ended(program: str, **environ: Any) -> list[tuple[int, str, str]]:
    port = free_port()
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(program, imports=IMPORTS, **environ, **environment(rank, 2, port)))
            for rank in range(2)
        ]
        return [program.end() for program in programs]


@pytest.mark.slow
def test_a_program_may_end_while_its_last_step_is_under_way() -> None:
    assert _ended(_LEFT_OPEN, whole_end=True, FAILS_AT="9") == [(0, "", "")] * 2


@pytest.mark.slow
def test_an_error_that_ends_a_program_is_told_at_exit() -> None:
    (status, _, complaints), (failed, _, _) = _ended(_LEFT_OPEN, whole_end=True, FAILS_AT="1")
    assert status == failed == 1
    assert "rank 1 is lost: it failed: ZeroDivisionError('in the training loop')" in complaints


@pytest.mark.slow
def test_a_machine_that_ends_with_an_error_tells_the_others() -> None:
    (status, said, _), (failed, _, complaints) = _ended(_PROGRAM)
    assert status == 0
    assert said == "MachineLost rank 1 is lost: it failed: ZeroDivisionError('in the training loop')\n"
    assert failed == 1
    assert "ZeroDivisionError: in the training loop" in complaints


@pytest.mark.slow
def test_a_machine_that_ends_between_forward_and_backward_is_named_to_the_others() -> None:
    (status, _, _), (_, said, _) = _ended(_LOSS_FAILS)
    assert status == 0
    assert said.startswith("MachineLost rank 0 is lost: it has closed its machines")
    assert "in backward of model 'm', in which rank 0 takes no part any more" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "back"),
    [
        ("to_reduce", 0),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("write", 0), ("write", 1))),
    ],
)
def test_an_error_between_what_machines_agreed_on_and_do_ends_them_all(place: str, back: int) -> None:
    (status, said, _), (failed, cause, _) = _ended(_OUT_OF_MEMORY, PLACE=place, BACK=str(back))
    assert cause == "MemoryError no memory is left\n"
    assert said == "MachineLost rank 1 is lost: it failed: MemoryError('no memory is left')\n"
    assert (status, failed) == (0, 0)
