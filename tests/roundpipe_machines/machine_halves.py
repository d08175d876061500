"""Trainings with masters in halves on several machines; each returns what must be the same with whole ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from machine_alone import error_of, rank_of
from machine_trainings import batch, row, square_error, weights, wrapped
from roundpipe import Runtime, TrainingWarning, load_checkpoint, save_checkpoint
from roundpipe.optim import SGD, Adafactor, AdamW, clip_grad_norm_
from rp_optim import SplitMaster
from rp_transfer import HostLimit

Found = dict[str, Any]
Turns = tuple[bool, ...]
STEPS = 4
# No first step of Adam ends on a tie, which halves round away from zero.
LR = 0.0307


class Training:
    """A row in bf16; `is_async` of each step."""

    def __init__(self, runtime: Runtime, master: str, make: Any = AdamW, **options: Any) -> None:
        self.layers = row(dropout=0.2).bfloat16()
        self.model = wrapped(runtime, self.layers, optim_dtype=torch.float32, master=master, **options)
        self.optimizer = make(self.model.optim_parameters(), lr=LR)
        self.losses: list[torch.Tensor] = []

    def step(self, number: int, *, is_async: bool) -> None:
        """A call and a clipped step."""
        self.call(number)
        self.model.step(self.update, is_async=is_async)

    def call(self, number: int) -> None:
        """A call."""
        x, y = (value.bfloat16() for value in batch(number))
        self.losses.append(self.model.forward_backward((x,), label=y, loss_fn=square_error))

    def update(self) -> None:
        """A step function."""
        clip_grad_norm_(self.model.optim_parameters(), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> dict[int, torch.Tensor]:
        """This machine's."""
        return {
            at: one.joined() if isinstance(one, SplitMaster) else one.detach().clone()
            for at, one in enumerate(self.model.optim_parameters())
            if not one.is_meta
        }

    def are_split(self) -> bool:
        """Whether this machine's masters are in halves, the upper of which are the weights."""
        pairs = zip(self.model.optim_parameters(), self.layers.parameters(), strict=True)
        own = [(master, weight) for master, weight in pairs if not master.is_meta]
        return all(
            isinstance(master, SplitMaster) and master.is_split and master.upper.data_ptr() == weight.data_ptr()
            for master, weight in own
        )

    def end(self) -> Found:
        """What it came to."""
        self.model.synchronize()
        return {
            "losses": self.losses,
            "weights": weights(self.layers),
            "masters": self.masters(),
            "split": self.are_split(),
            "second blocks": self.model.memory_report(self.optimizer).second_blocks_bytes,
            "masters' bytes": self.model.memory_report(self.optimizer).masters_bytes,
        }


def _stepped(runtime: Runtime, master: str, turns: Turns, make: Any = AdamW, **options: Any) -> Found:
    training = Training(runtime, master, make, **options)
    for number, is_async in enumerate(turns):
        training.step(number, is_async=is_async)
    return training.end()


def _written(runtime: Runtime, master: str) -> Found:
    """All machines write to weights while a step's result is there, but not published."""
    training = Training(runtime, master, double_buffer=True)
    for number in range(STEPS):
        training.step(number, is_async=True)
        if number % 2:
            runtime.optimizer.wait()
            with torch.no_grad():
                training.layers[0].weight.mul_(1.5)
                training.layers[3].weight.mul_(0.5)
    return training.end()


def _frozen_then_not(runtime: Runtime, master: str) -> Found:
    """A layer is frozen for a while."""
    training = Training(runtime, master)
    for number, is_trained in enumerate((True, False, True)):
        training.layers[3].requires_grad_(is_trained)
        training.step(number, is_async=False)
    return training.end()


SYNC: Turns = (False,) * STEPS
KINDS: dict[str, Callable[[Runtime, str], Found]] = {
    "synchronous": partial(_stepped, turns=SYNC),
    "with second blocks": partial(_stepped, turns=SYNC, double_buffer=True),
    "asynchronous": partial(_stepped, turns=(True,) * STEPS),
    "both": partial(_stepped, turns=(False, True, True, False, False, True)),
    "registered": partial(_stepped, turns=SYNC, pin_model="register"),
    "SGD": partial(_stepped, turns=(True,) * STEPS, make=partial(SGD, momentum=0.9)),
    "Adafactor": partial(_stepped, turns=SYNC, make=Adafactor),
    "8 bits": partial(_stepped, turns=SYNC, make=partial(AdamW, state="8bit")),
    "written": _written,
    "frozen": _frozen_then_not,
}


def both(runtime: Runtime) -> Found:
    """Each training with whole masters and with halves."""
    return {name: [train(runtime, master) for master in ("whole", "split")] for name, train in KINDS.items()}


def mistakes(runtime: Runtime) -> list[str]:
    """Masters of two kinds; a step that fails on machine 1 when others have updated; torch's optimizer."""
    found = [error_of(lambda: Training(runtime, ("whole", "split")[rank_of(runtime)]))]
    torch.manual_seed(0)
    training = Training(runtime, "split")
    whole = weights(training.layers)
    training.call(0)

    def fail() -> None:
        if rank_of(runtime) == 1:
            raise ZeroDivisionError("in the step function")
        training.optimizer.step()

    found.append(error_of(lambda: training.model.step(fail, is_async=False)))
    found.append(error_of(training.model.reset))
    found.append(error_of(lambda: training.call(1)))
    torch.manual_seed(0)
    training.model.load_state_dict(whole)
    training.model.zero_grad()
    training.step(2, is_async=False)
    end = training.end()
    found.append(str(end["split"]))
    found.append(f"{sum(value.double().sum() for value in end['weights'].values())}")
    return found


def by_torch(runtime: Runtime) -> Found:
    """Torch's own optimizer needs whole masters."""
    torch.manual_seed(0)
    found: Found = {}
    for master in ("whole", "split"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)
            found[master] = _stepped(runtime, master, (False, True, True, False), torch.optim.AdamW)
    return found


def saved(runtime: Runtime, *, folder: str, is_async: bool) -> Found:
    """Trainings that save after two steps and go on for two."""
    found: Found = {}
    for master in ("whole", "split"):
        torch.manual_seed(0)
        training = Training(runtime, master)
        for number in range(4):
            if number == 2:
                save_checkpoint(f"{folder}/{master}", training.model, training.optimizer)
            training.step(number, is_async=is_async)
        found[master] = training.end()
    return found


def resumed(runtime: Runtime, *, folder: str, is_async: bool) -> Found:
    """Trainings that go on from there, with masters of either kind."""
    found: Found = {}
    for was in ("whole", "split"):
        for master in ("whole", "split"):
            training = Training(runtime, master)
            load_checkpoint(f"{folder}/{was}", training.model, training.optimizer)
            for number in range(2, 4):
                training.step(number, is_async=is_async)
            found[f"{was} {master}"] = training.end()
    return found


def without_second_blocks(runtime: Runtime, *, folder: str) -> Found:
    """What is loaded is a step behind, but weights are halves of masters and have no other place.

    First machine 1 has no room for second blocks, which others would have.
    """
    training = Training(runtime, "split")
    limit = runtime.host_limit
    if rank_of(runtime) == 1:
        runtime.host_limit = lambda: HostLimit("the machine", 1 << 30, 0)  # type: ignore[method-assign]
    refused = error_of(lambda: load_checkpoint(f"{folder}/split", training.model, training.optimizer))
    runtime.host_limit = limit  # type: ignore[method-assign]
    training = Training(runtime, "split", double_buffer=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint(f"{folder}/split", training.model, training.optimizer)
    loaded = {name: value.detach().clone() for name, value in training.layers.named_parameters()}
    training.step(2, is_async=False)
    told = [str(one.message) for one in caught if "last step's result at once" in str(one.message)]
    return {**training.end(), "loaded": loaded, "told": told, "refused": refused}
