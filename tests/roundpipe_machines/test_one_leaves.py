"""A program that torchrun starts needs to say nothing of machines; one that ends tells the others why."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from on_machines import IMPORTS, environment
from processes import free_port
from programs import Program
from roundpipe.cli import main

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


def test_a_machine_that_ends_with_an_error_tells_the_others() -> None:
    port = free_port()
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(_PROGRAM, imports=IMPORTS, **environment(rank, 2, port)))
            for rank in range(2)
        ]
        (status, said, _), (failed, _, complaints) = (program.end() for program in programs)
    assert status == 0
    assert said == "MachineLost rank 1 is lost: it failed: ZeroDivisionError('in the training loop')\n"
    assert failed == 1
    assert "ZeroDivisionError: in the training loop" in complaints


def test_the_command_line_refuses_to_train_on_several_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "must be started on one machine" in capsys.readouterr().err
