"""`Several`: the machines of a runtime, as the engine asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

from rp_dist import Machines
from rp_engine.connecting import Block, CallBatch, Facts, Launch, ModelState, Shards, StepGradients, draw_seed
from rp_engine.errors import AloneOnly, MachineFailed
from rp_transfer import Ticket

from rp_machines.facts import ComparedModel, fingerprint
from rp_machines.gathering import Gathering
from rp_machines.group import MachineGroup
from rp_machines.reduction import ReducedBlock
from rp_machines.shared_call import SharedCall
from rp_machines.shared_step import SharedStep
from rp_machines.talk import Talk
from rp_machines.telling import telling, telling_early

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


class Several:
    """Several machines, one process each: see `rp_engine`'s `Peers`.

    `machines`: their connections. `is_own`: these were opened here, and `close` closes them.
    """

    is_alone: bool = False

    def __init__(self, machines: Machines, *, is_own: bool) -> None:
        self.machines = machines
        self.rank: int = machines.rank
        self.size: int = machines.size
        self._group = MachineGroup(machines, is_own=is_own)
        self._calls = self._group.calls

    @property
    def network_gb_s(self) -> float:
        """What each machine sends to the others, and receives meanwhile, measured when they connected."""
        return self.machines.network_gb_s

    def refuse(self, words: str) -> None:
        """Raise `AloneOnly`."""
        raise AloneOnly(words)

    def fail(self, error: BaseException) -> None:
        """Tell the other machines that this one ends with an error, so that none waits for it."""
        self._group.fail(error)

    def close(self) -> None:
        """End the thread, and leave the group if it was opened here, once all others do so, too."""
        self._group.close()

    def new_talk(self) -> Talk:
        """Return a talk of its own for work beside calls; all machines begin such work in the same order."""
        return self._group.new_talk()

    # A model

    def wrap(self, kind: str, build: Callable[[], ModelState]) -> tuple[ModelState, ComparedModel]:
        """Build a model, and check that all machines have the same weights."""
        number = self._group.new_model()
        with self.telling(kind):
            state = build()
        self._calls.agree(kind, fingerprint(state))
        return state, ComparedModel(self._calls, state, number)

    def shards(self) -> Shards:
        """Return who will own which parameter of a new model."""
        return Shards(self.rank, self.size)

    # On the launcher's thread

    def telling(self, kind: str) -> AbstractContextManager[None]:
        """Tell the other machines, which wait for this one to say this kind of thing, what is raised inside."""
        return telling(self._calls, kind)

    def agree(self, kind: str, facts: Facts, value: _Value) -> list[_Value]:
        """Return each machine's value, after checking that the facts are the same on all."""
        return self._calls.agree(kind, facts(), value)

    def most(self, kind: str, count: Callable[[], int]) -> int:
        """Return the largest of the machines' numbers."""
        with self.telling(kind):
            own = count()
        return max(self._calls.say(kind, own))

    # On the caller's thread

    def telling_early(self, kind: str, launch: Launch, draws: Callable[[], bool]) -> AbstractContextManager[None]:
        """As `telling`, before a call that machines share is launched. `draws`: whether it draws a seed."""
        return telling_early(self._calls, kind, launch, draws)

    def decide(
        self, kind: str, launch: Launch, decide: Callable[[], _Result], words: Callable[[_Result], str]
    ) -> tuple[_Result, bool]:
        """Return what this machine decides before a call that machines share, and whether all decide alike."""
        with self.telling_early(kind, launch, _always):
            found = decide()
        told = launch(partial(_say_before_call, self._calls, kind, words(found)))
        return found, len(set(told)) == 1

    def share(self, kind: str, batch: CallBatch) -> SharedCall:
        """Divide a call whose batch every machine is given as a whole."""
        return SharedCall.of(self._group, kind, batch)

    # A step

    def gradients(self, state: ModelState, block: Block, ticket: Ticket, num_runs: int) -> ReducedBlock:
        """Return the sums of a block's gradients in a step, at their owners."""
        return ReducedBlock(self.rank, state, block, ticket, num_runs)

    def step(self, gradients: Sequence[StepGradients], stepped: Callable[[], list[str]]) -> SharedStep:
        """Begin to reduce these gradients, as they arrive, for a step of all machines."""
        # Those that `gradients` has returned.
        return SharedStep(self._group, cast("Sequence[ReducedBlock]", gradients), stepped)

    def results(self, state: ModelState) -> Gathering:
        """Return the results of a model's steps, which go from their owners to all machines."""
        return Gathering(self._group, state)


def _say_before_call(calls: Talk, kind: str, words: str) -> list[Any]:
    try:
        return calls.say(kind, words)
    except MachineFailed:
        # As the machine has that failed, see `telling_early`: the generators stay the same.
        draw_seed()
        raise


def _always() -> bool:
    return True
