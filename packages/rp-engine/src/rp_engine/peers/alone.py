"""`Alone`: one machine, which tells nobody, waits for nobody and has all of each call and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from rp_optim import GradientPair
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_state.shards import Undivided
from rp_telemetry.tracing import SILENT, Tracer
from rp_transfer import Ticket

from rp_engine.peers.call import UNDRAWN, CallBatch, Facts, Numbers, Rows
from rp_engine.peers.peers import Launch
from rp_engine.peers.step import Incomplete, StepGradients

_Item = TypeVar("_Item")
_Batch = TypeVar("_Batch", bound=CallBatch)
_Result = TypeVar("_Result")
_NOTHING_TOLD = nullcontext()


class Alone:
    """One machine: see `Peers`.

    >>> ALONE.size, ALONE.agree("step", dict, 3), ALONE.most("choosing", lambda: 4)
    (1, [3], 4)
    """

    rank: int = 0
    size: int = 1
    is_alone: bool = True
    network_gb_s: float = math.inf

    def refuse(self, words: str) -> None:
        """Refuse nothing."""

    def fail(self, error: BaseException) -> None:
        """Tell nobody."""

    def close(self) -> None:
        """Wait for nobody."""

    def new_talk(self) -> TalkAlone:
        """Return a talk in which only this machine speaks."""
        return TalkAlone()

    # A model

    def wrap(self, kind: str, build: Callable[[], ModelState]) -> tuple[ModelState, OwnModel]:
        """Build a model."""
        return build(), OwnModel()

    def shards(self) -> Undivided:
        """Return that this machine has all."""
        return Undivided()

    # On the launcher's thread

    def telling(self, kind: str) -> AbstractContextManager[None]:
        """Tell nobody."""
        return _NOTHING_TOLD

    def agree(self, kind: str, facts: Facts, value: _Item) -> list[_Item]:
        """Return the value; nobody reads the facts."""
        return [value]

    def most(self, kind: str, count: Callable[[], int]) -> int:
        """Return the number."""
        return count()

    # On the caller's thread

    def telling_early(self, kind: str, launch: Launch, draws: Callable[[], bool]) -> AbstractContextManager[None]:
        """Tell nobody."""
        return _NOTHING_TOLD

    def decide(
        self, kind: str, launch: Launch, decide: Callable[[], _Result], words: Callable[[_Result], str]
    ) -> tuple[_Result, bool]:
        """Decide."""
        return decide(), True

    def share(self, kind: str, batch: CallBatch) -> WholeCall:
        """Return the whole call."""
        return WholeCall()

    # A step

    def gradients(self, state: ModelState, block: Block, ticket: Ticket, num_runs: int) -> OwnGradients:
        """Return the gradients of this machine."""
        return OwnGradients(state, block, ticket, num_runs)

    def step(self, gradients: Sequence[StepGradients], stepped: Callable[[], list[str]]) -> OwnStep:
        """Return a step that nobody else takes."""
        return OwnStep()

    def results(self, state: ModelState) -> OwnResults:
        """Return results that nobody else has."""
        return OwnResults(state)


class TalkAlone:
    """What one machine tells itself: see `Talk`."""

    def say(self, kind: str, value: Any = None, *, error: BaseException | None = None) -> list[Any]:
        """Return the value; an error is its caller's to raise."""
        return [value]

    def is_of_machines(self, error: BaseException) -> bool:
        """There are no others."""
        return False


class OwnModel:
    """A model that one machine has: see `SharedModel`."""

    def now(self) -> dict[str, Any]:
        """Nothing must be the same elsewhere."""
        return {}

    def same(self, kind: str) -> None:
        """Compare nothing."""

    def same_call(self, kind: str, arguments: Any) -> None:
        """Compare nothing."""

    def note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note nothing."""

    def note_collected(self, block: Block, found: Sequence[int]) -> None:
        """Note nothing."""

    def note_stepped(self) -> None:
        """Note nothing."""

    def note_dropped(self) -> None:
        """Note nothing."""


class WholeCall:
    """All microbatches of a call: see `CallShare`."""

    def own(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return all."""
        return items

    def own_batch(self, batch: _Batch) -> _Batch:
        """Return all."""
        return batch

    def own_outputs(self, items: Sequence[_Item]) -> dict[int, _Item]:
        """Return all, by their numbers."""
        return dict(enumerate(items))

    def numbers(self, draws: Callable[[], bool]) -> Numbers:
        """Leave the seed to the run, which draws one only if it uses it."""
        return UNDRAWN

    def refuse(self, words: str) -> None:
        """Refuse nothing."""

    def telling(self) -> AbstractContextManager[None]:
        """Tell nobody."""
        return _NOTHING_TOLD

    def losses_of_all(self, losses: Rows, facts: Facts) -> list[Sequence[torch.Tensor]]:
        """Return them."""
        return list(losses)

    def rows_of_all(self, rows: Rows, facts: Facts) -> Rows:
        """Return them."""
        return rows

    def begin(self) -> int:
        """Nobody else waits for the backward."""
        return 0

    def end(self, number: int, backward: Callable[[], _Result]) -> _Result:
        """Run it."""
        return backward()

    def telling_backward(self) -> AbstractContextManager[None]:
        """Tell nobody."""
        return _NOTHING_TOLD

    def norm_of(self, tensors: Sequence[torch.Tensor | None]) -> float:
        """Nobody compares it."""
        return 0.0

    def own_grads(self, counts: Sequence[int], grads: Sequence[_Item]) -> Sequence[_Item]:
        """Return all."""
        return grads

    def input_grads_of_all(
        self, grads: Sequence[torch.Tensor | None], norm: float, facts: Facts
    ) -> list[torch.Tensor | None]:
        """Return them."""
        return list(grads)


class OwnGradients:
    """One block's gradients in a step of one machine: see `StepGradients`."""

    def __init__(self, state: ModelState, block: Block, ticket: Ticket, num_runs: int) -> None:
        self._gradient = block.gradient
        self._state = state
        self._ticket = ticket
        self._num_runs = num_runs

    def done(self) -> bool:
        """Return whether all tasks that add to them have done so."""
        return self._ticket.open()

    def wait(self) -> None:
        """Wait for these tasks."""
        self._ticket.enter()

    def check_complete(self) -> None:
        """Raise `Incomplete` if a run that adds to them has failed."""
        # A run launched after this step does not add to its gradients.
        self._state.health.refuse_incomplete_before(self._num_runs, Incomplete)

    def source(self, index: int) -> torch.Tensor | GradientPair | None:
        """Return the gradient where it lies."""
        return self._gradient.source(index)

    def remaining(self, remains: Sequence[Any]) -> list[Any]:
        """Return them."""
        return list(remains)


class OwnStep:
    """A step that one machine takes: see `SharedStep`."""

    share: None = None
    sums: bool = False

    def publishes(self, *, is_taken: bool) -> bool:
        """Publish also what code outside has written to masters, if the step could not be taken."""
        return True

    def end(self, changed: object, dropped: Sequence[Sequence[int]]) -> list[Any]:
        """Return the changes of this machine."""
        return [changed]

    def tell(self, error: BaseException) -> None:
        """Tell nobody."""

    def has_changed(self, here: bool) -> bool:
        """Return whether this machine's masters have changed."""
        return here

    def settle(self, tracer: Tracer) -> None:
        """Nothing is on its way."""


class OwnResults:
    """The results of one machine's steps: see `Results`."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    def expect(self) -> None:
        """Expect nothing from others."""

    def note_complete(self, block: Block, index: int) -> None:
        """Send nothing."""

    def changed(self) -> list[list[int]]:
        """Nothing was sent."""
        return []

    def complete(self, changed: Sequence[Sequence[Sequence[int]]]) -> None:
        """Send nothing."""

    def give_up(self) -> None:
        """Nobody waits for it."""

    def skip(self) -> None:
        """Nobody waits for it."""

    def publish(
        self, turns: Mapping[Block, Ticket], enter: Callable[[Block, Ticket], None], tracer: Tracer = SILENT
    ) -> None:
        """Publish each block in its turn."""
        state = self._state
        for block, ticket in turns.items():
            enter(block, ticket)
            # After a failed step the masters are a mixture of old and new: do not publish them.
            if state.health.has_whole_step:
                block.publish(state.backend, [state.masters[parameter] for parameter in block.tensors])
            ticket.leave()
            state.publications.note_published(block)

    def take_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Masters were set from them: nothing else has them."""

    def apart(self) -> dict[torch.Tensor, torch.Tensor]:
        """A state dict is made of the weights, after their publication."""
        return {}

    def wait(self) -> None:
        """Nothing is on its way."""


ALONE = Alone()
