"""Loans: gradients lent to the masters for one step, read where they lie, each block as soon as it has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from rp_optim import link, unlink
from rp_transfer import Ticket

from roundpipe.gradient import Gradient
from roundpipe.state import Block, ModelState


class Incomplete(Exception):
    """Gradients of this step were never finished; never seen by users but inside a step function."""


class Loan:
    """One block's part in a step, on the optimizer's thread.

    `ticket` is the gradients' turn, `after` the weights', where the step writes them itself. `published` holds the
    indices of the weights that the step wrote.
    """

    def __init__(
        self, state: ModelState, block: Block, ticket: Ticket, after: Ticket | None, num_runs: int
    ) -> None:
        assert block.gradient is not None
        self.block = block
        self.gradient: Gradient = block.gradient
        self.published: set[int] = set()
        self._state = state
        self._ticket = ticket
        self._after = after
        self._num_runs = num_runs
        self._arrived = False
        self._may_publish = False
        self._lent = False
        self._versions: list[int] = []

    def masters(self) -> list[torch.nn.Parameter]:
        """The block's masters, in its order."""
        return [self._state.masters[parameter] for parameter in self.block.tensors]

    def lend(self) -> None:
        """Link every master to its place in the gradient block, and to its weight's."""
        self._lent = True
        self._versions = [master._version for master in self.masters()]
        for index, master in enumerate(self.masters()):
            link(
                master,
                partial(self._gradient, index),
                partial(self._weight, index),
                self._ready,
                partial(self.published.add, index),
            )

    def has_changed(self) -> bool:
        """Whether the step has updated any of the masters."""
        versions = [master._version for master in self.masters()] if self._lent else self._versions
        return bool(self.published) or versions != self._versions

    def end(self) -> list[torch.Tensor | object | None]:
        """End the links; what `rp_optim.unlink` says of each."""
        if not self._lent:
            return []
        self._lent = False
        return [unlink(master) for master in self.masters()]

    def arrive(self) -> None:
        """Block until all tasks that add to these gradients are over."""
        if self._arrived:
            return
        self._ticket.enter()
        self._arrived = True
        if (held := self.gradient.first_or_none()) is not None:
            self._state.backend.host_touch(read=(held,), write=(held,), what="the step's gradients")

    def _ready(self, wait: bool, /) -> bool:
        if not (self._arrived or wait or self._ticket.open()):
            return False
        self.arrive()
        broken = self._state.broken
        # A run launched after this step has no part in its gradients.
        if broken is not None and broken.run < self._num_runs:
            raise Incomplete(broken.error)
        return True

    def _gradient(self, index: int) -> torch.Tensor | None:
        return self.gradient.view(index).contiguous() if index in self.gradient.written else None

    def _weight(self, index: int) -> torch.Tensor | None:
        value = self.block.values[index]
        if self._after is None or not value.is_contiguous():
            return None
        if not self._may_publish:
            self._after.enter()
            self._may_publish = True
            self._state.backend.host_touch(write=self.block.host_tensors(), what="publishing weights")
        return value


def take_back(loans: Sequence[Loan]) -> None:
    """End the loans: what the step function left in a ``.grad`` goes on being added to, as in torch."""
    moved: list[tuple[Gradient, int, torch.Tensor]] = []
    for loan in loans:
        # Perhaps dropped without a look: it must have come before it can go.
        loan.arrive()
        for index, remains in enumerate(loan.end()):
            if remains is None:
                loan.gradient.drop((index,))
            elif isinstance(remains, torch.Tensor):
                # Perhaps another parameter's place: nothing is written before all has been read.
                moved.append((loan.gradient, index, remains.clone()))
    for gradient, index, value in moved:
        gradient.put(index, value)


def abandon(loans: Iterable[Loan]) -> None:
    """End the loans of a step that failed, and leave the gradients as they are."""
    for loan in loans:
        loan.end()
