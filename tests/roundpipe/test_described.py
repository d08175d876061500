"""An error that cannot be described wakes everybody and arrives all the same."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import Any

import pytest
import torch
from plain import assert_near, batch, gradients, mlp, plans, square_error, train_call, twin
from roundpipe import GradientsIncomplete, RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from rp_engine.errors import add_note, in_words
from torch import nn

pytestmark = pytest.mark.timeout(30)


class Unspoken(Exception):
    """Its repr reads an attribute that was never set."""

    def __repr__(self) -> str:
        return f"Unspoken({self.words})"


class Noted(Exception):
    """Its notes are no list, so that none can be added."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.__notes__ = ("t",)


class Refusing(Exception):
    """Takes no note, whatever it is."""

    def add_note(self, note: str) -> None:
        raise AttributeError(f"no notes here, such as {note}")


class Sealed(Exception):
    """Has no attributes and takes none."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"nobody reads {name}")

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"nobody writes {name}")


class Rude(Exception):
    """Its repr ends threads."""

    def __repr__(self) -> str:
        raise SystemExit


class Full(torch.OutOfMemoryError):
    """Out of memory, and no words for it."""

    __repr__ = Unspoken.__repr__
    add_note = Refusing.add_note


class Hidden(type):
    """Classes whose name cannot be read."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise AttributeError("no name")


class Nameless(Exception, metaclass=Hidden):
    """Its class hides its name."""


KINDS = (Unspoken, Noted, Refusing, Sealed, Rude, Full, Nameless)


class Failing(nn.Module):
    """A linear layer that raises what it is told to, in forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.plan: dict[str, BaseException] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Failing:
        new = Failing.__new__(Failing)
        nn.Module.__init__(new)
        memo[id(self)] = new
        new.inner = copy.deepcopy(self.inner, memo)
        new.plan = self.plan
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "forward" in self.plan:
            raise self.plan["forward"]
        out = self.inner(x)
        if out.requires_grad:
            out.register_hook(self._backward)
        return out

    def _backward(self, grad: torch.Tensor) -> torch.Tensor:
        if "backward" in self.plan:
            raise self.plan["backward"]
        return grad


def wrapped(runtime: Runtime) -> tuple[RoundPipe, Failing]:
    torch.manual_seed(0)
    failing = Failing()
    row = nn.Sequential(nn.Linear(4, 4), failing, nn.Linear(4, 3))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(3, 2)["one layer a stage"])
    return RoundPipe(row, runtime=runtime, model_run_config=config), failing


def train(model: RoundPipe) -> None:
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.synchronize()


def assert_trains(model: RoundPipe) -> None:
    truth = twin(model.model)
    truth.zero_grad()
    train(model)
    train_call(truth, *batch(6), microbatches=1)
    assert_near(gradients(model.model), gradients(truth), 1e-5)
    model.zero_grad()


def seen(error: BaseException, wanted: BaseException) -> bool:
    """Whether it is the error, or what Python made of it on its way: context managers set its traceback."""
    while error is not wanted:
        if (behind := error.__context__) is None:
            return False
        error = behind
    return True


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layers_error_without_words_arrives_and_the_model_goes_on(
    two: Runtime, kind: type[Exception], phase: str
) -> None:
    model, failing = wrapped(two)
    error = failing.plan[phase] = kind("as planned")
    with pytest.raises(Exception, match=r".*") as caught:
        train(model)
    arrived = seen(caught.value, error)
    assert arrived
    failing.plan.clear()
    if phase == "backward":
        # Whether the gradients of the layer above have begun to leave is a matter of luck.
        with suppress(GradientsIncomplete):
            train(model)
    model.reset()
    assert_trains(model)


def test_an_error_keeps_the_one_that_it_was_raised_after(two: Runtime) -> None:
    model, failing = wrapped(two)
    error, before = ValueError("as planned"), KeyError("earlier")
    try:
        try:
            raise before
        finally:
            raise error
    except ValueError:
        failing.plan["forward"] = error
    with pytest.raises(ValueError, match="planned") as caught:
        train(model)
    assert caught.value.__context__ is before


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_steps_error_without_words_arrives_and_leaves_no_master_linked(
    two: Runtime, kind: type[Exception], is_async: bool
) -> None:
    model = RoundPipe(mlp(), runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    error = kind("as planned")

    def fail() -> None:
        raise error

    def step() -> None:
        model.step(fail, is_async)
        model.synchronize()

    train(model)
    with pytest.raises(Exception, match=r".*") as caught:
        step()
    arrived = seen(caught.value, error)
    assert arrived
    with pytest.raises(StepFailed, match="failed half-way"):
        train(model)
    model.reset()
    train(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert_trains(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_several_late_errors_without_words_are_told_together(two: Runtime, kind: type[Exception]) -> None:
    models = [RoundPipe(mlp(), runtime=two) for _ in range(2)]
    errors = [kind("first"), kind("second")]

    def fail(error: BaseException) -> None:
        raise error

    model = models[0]
    model.step(fail, True, errors[0])
    model._whole.hosts[0].submit_step(lambda _: fail(errors[1]))
    with pytest.raises(Exception, match=r".*") as caught:
        model.synchronize()
    arrived = seen(caught.value, errors[0])
    assert arrived
    model.reset()
    assert_trains(model)


def test_an_error_that_takes_no_note_has_it_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "roundpipe"):
        add_note(Refusing("as planned"), "in layer 3")
        add_note(good := ValueError(), "in layer 4")
    assert [record.getMessage() for record in caplog.records] == [
        "cannot add a note to Refusing('as planned'); the note is: in layer 3"
    ]
    assert good.__notes__ == ["in layer 4"]
    assert in_words(Unspoken()) == "Unspoken (whose repr fails)"
