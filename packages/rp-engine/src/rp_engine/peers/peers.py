"""The machines that train one model together, as calls, steps and checkpoints ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_state.shards import Owners
from rp_transfer import Ticket

from rp_engine.peers.call import CallBatch, CallShare, Facts
from rp_engine.peers.step import Results, SharedStep, StepGradients

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


class Launch(Protocol):
    """`Runtime.launch`: runs a body on the launcher's thread."""

    def __call__(self, body: Callable[[], _Result], /) -> _Result: ...


class Talk(Protocol):
    """What machines tell each other on one thread: all say the same kind of thing at the same time."""

    def say(self, kind: str, value: Any = None, *, error: BaseException | None = None) -> list[Any]:
        """Tell a value that JSON can hold, or that an error happened here; return what each machine told.

        Raises `MachineFailed` if any machine told an error, this one too; one machine alone returns.
        """
        ...

    def is_of_machines(self, error: BaseException) -> bool:
        """Return whether an error says that the machines do not go on together: one was lost, or they disagree."""
        ...


class SharedModel(Protocol):
    """One model, of which all machines have the same. On the launcher's thread."""

    def now(self) -> dict[str, Any]:
        """Return what must be the same on all machines whenever they call or step it, by name."""
        ...

    def same(self, kind: str) -> None:
        """Check that all machines do this to this model."""
        ...

    def same_call(self, kind: str, arguments: Any) -> None:
        """Check that all machines do this, with the same model, weights and tree of arguments."""
        ...

    def note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that code outside has written these trained weights."""
        ...

    def note_collected(self, block: Block, found: Sequence[int]) -> None:
        """Note that the ``.grad`` of these parameters of a block came from outside of the engine."""
        ...

    def note_stepped(self) -> None:
        """Note that a step takes the gradients of all calls so far."""
        ...

    def note_dropped(self) -> None:
        """Note that gradients are dropped outside of step functions."""
        ...


class Peers(Protocol):
    """The machines of a runtime: `Alone`, or several of them, as rp-machines has them.

    All machines do the same in the same order, also where one of them fails: so what is said at one place of one
    thread is said there on all. `kind`: what they do, in words. `rank`: this machine's number, of `size`.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_alone(self) -> bool: ...

    @property
    def network_gb_s(self) -> float:
        """What each machine sends to the others, and receives meanwhile, in GB/s."""
        ...

    def refuse(self, words: str) -> None:
        """Raise `AloneOnly` on several machines."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other machines that this one ends with an error, so that none waits for it."""
        ...

    def close(self) -> None:
        """End what was opened here, once all others do so, too."""
        ...

    def new_talk(self) -> Talk:
        """Return a talk of its own for work beside calls; all machines begin such work in the same order."""
        ...

    # A model

    def wrap(self, kind: str, build: Callable[[], ModelState]) -> tuple[ModelState, SharedModel]:
        """Build a model that all machines have; all wrap models in the same order."""
        ...

    def shards(self) -> Owners:
        """Return who will own which parameter of a new model."""
        ...

    # On the launcher's thread

    def telling(self, kind: str) -> AbstractContextManager[None]:
        """Tell the other machines, which wait for this one to say this kind of thing, what is raised inside."""
        ...

    def agree(self, kind: str, facts: Facts, value: _Value) -> list[_Value]:
        """Return each machine's value, JSON, after checking that what `facts` returns is the same on all."""
        ...

    def most(self, kind: str, count: Callable[[], int]) -> int:
        """Return the largest of the machines' numbers."""
        ...

    # On the caller's thread

    def telling_early(self, kind: str, launch: Launch, draws: Callable[[], bool]) -> AbstractContextManager[None]:
        """As `telling`, before a call that machines share is launched. `draws`: whether it draws a seed."""
        ...

    def decide(
        self, kind: str, launch: Launch, decide: Callable[[], _Result], words: Callable[[_Result], str]
    ) -> tuple[_Result, bool]:
        """Return what this machine decides before a call that machines share, and whether all decide alike.

        `words`: what tells one decision from another.
        """
        ...

    def share(self, kind: str, batch: CallBatch) -> CallShare:
        """Divide a call whose batch every machine is given as a whole.

        Raises `ValueError` if there are fewer microbatches than machines.
        """
        ...

    # A step

    def gradients(self, state: ModelState, block: Block, ticket: Ticket, num_runs: int) -> StepGradients:
        """Return a block's gradients in a step. `ticket`: the turn on them. `num_runs`: of the runs before it."""
        ...

    def step(self, gradients: Sequence[StepGradients], stepped: Callable[[], list[str]]) -> SharedStep:
        """Begin a step on these gradients, in the order of the model.

        `stepped`: returns which optimizers have stepped in it, and with what settings.
        """
        ...

    def results(self, state: ModelState) -> Results:
        """Return what becomes of the results of a model's steps."""
        ...
