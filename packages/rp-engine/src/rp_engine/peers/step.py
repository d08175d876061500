"""What a step asks of the machines that take it together, and how one of them says that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from rp_optim import GradientPair
from rp_optim.masters import MasterExchange
from rp_state.block import Block
from rp_telemetry.tracing import SILENT, Tracer
from rp_transfer import Ticket


class Incomplete(BaseException):
    """A run failed before it completed the gradients of this step.

    Not an `Exception`, so that a step function does not catch it and continue. `cause`: the error to raise
    instead, if no call of this machine raises its own.
    """

    def __init__(self, words: str, cause: BaseException | None = None) -> None:
        super().__init__(words)
        self.cause = cause


class StepGradients(Protocol):
    """One block's gradients in one step: those of this machine, or sums over all."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise without waiting."""
        ...

    def wait(self) -> None:
        """Wait until all that adds to them has done so. May raise `Incomplete`."""
        ...

    def check_complete(self) -> None:
        """Raise `Incomplete` if a run that adds to them has failed; call it after `wait`."""
        ...

    def source(self, index: int) -> torch.Tensor | GradientPair | None:
        """Return what the optimizer reads of one parameter; None if it has no gradient here."""
        ...

    def remaining(self, remains: Sequence[Any]) -> list[Any]:
        """Return what goes on accumulating of each parameter. `remains`: what `rp_optim.unlink` has returned."""
        ...


class SharedStep(Protocol):
    """What machines tell each other in one step; used on the optimizer's thread.

    `share`: exchanges values with the others, see `rp_optim.masters.MasterExchange`; None: there are none. `sums`:
    whether gradients become sums over machines, so that those of a step that failed must be dropped.
    """

    @property
    def share(self) -> MasterExchange | None: ...
    @property
    def sums(self) -> bool: ...

    def publishes(self, *, is_taken: bool) -> bool:
        """Return whether the step publishes. `is_taken`: all of its gradients were there."""
        ...

    def end(self, changed: object, dropped: Sequence[Sequence[int]]) -> list[Any]:
        """End the step function; return the `changed`, JSON, of each machine: its changes since it has sent.

        `dropped`: for each block, the parameters whose gradients were dropped or set to zero.

        Raises if the step has failed elsewhere, or was another one there.
        """
        ...

    def tell(self, error: BaseException) -> None:
        """Report that the step has failed here."""
        ...

    def has_changed(self, here: bool) -> bool:
        """Return whether a step without all of its gradients has changed a master on any machine."""
        ...

    def settle(self, tracer: Tracer) -> None:
        """Wait until nothing reads or writes gradients for this step any more."""
        ...


class Results(Protocol):
    """The results of one model's steps, on their way into the weights that calls read.

    Used on the optimizer's thread, or while that thread is idle.
    """

    def expect(self) -> None:
        """Begin a step: from now on, take its results."""
        ...

    def note_complete(self, block: Block, index: int) -> None:
        """Note that a parameter's result is in the second block."""
        ...

    def changed(self) -> list[list[int]]:
        """Return, for each block, what must be sent again after all have taken the step."""
        ...

    def complete(self, changed: Sequence[Sequence[Sequence[int]]]) -> None:
        """Complete a step that all machines have taken. `changed`: what `changed` has returned on each."""
        ...

    def give_up(self) -> None:
        """After a failed step, send what other machines wait for, although nobody uses it."""
        ...

    def skip(self) -> None:
        """As `give_up`, if a step could not begin here."""
        ...

    def publish(
        self, turns: Mapping[Block, Ticket], enter: Callable[[Block, Ticket], None], tracer: Tracer = SILENT
    ) -> None:
        """Publish each block in its turn, unless the step failed; `enter` waits for a turn."""
        ...

    def take_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Publish these parameters' values, too: on every machine, their masters were just set from them."""
        ...

    def apart(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the last step's result for each trained parameter, if only second blocks have it."""
        ...

    def wait(self) -> None:
        """Wait until the results that are under way are here."""
        ...
