"""Links from master weights to gradient blocks for one step, so that the optimizer reads gradients in place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from rp_optim import link, unlink
from rp_optim.masters import MasterExchange, link_of
from rp_state.block import Block
from rp_state.gradient import Gradient
from rp_state.master import is_split, reading
from rp_state.model_state import ModelState
from rp_telemetry.tracing import OPTIMIZER, SILENT, Tracer
from rp_transfer import Ticket

from rp_engine.errors import RoundPipeError
from rp_engine.peers.step import Results, StepGradients


class Consumed:
    """Counts the blocks of a step that have released their gradients, in order; other blocks reuse the memory."""

    def __init__(self) -> None:
        self.count = 0


class KeptGradients:
    """A block's gradients stay until the step function drops them, and may be read in any order.

    `consumes`: the step releases them when it has read them, as the block with this `number`.
    """

    consumes: bool = False
    number: int | None = None

    def may_read(self) -> bool:
        """Return whether the gradients may be read now."""
        return True

    def is_due(self) -> bool:
        """Return whether they are released now; if so, the next block's are due."""
        return False


class ConsumingTurn(KeptGradients):
    """A block's position in the order in which a step during backward releases gradients.

    `consumed`: of all blocks of the step.
    """

    consumes: bool = True

    def __init__(self, number: int, consumed: Consumed) -> None:
        self.number = number
        self.consumed = consumed

    def may_read(self) -> bool:
        """Return whether all blocks before this one have released their gradients, and this one has not."""
        return self.consumed.count == self.number

    def is_due(self) -> bool:
        """Return the same, and count this block."""
        is_due = self.may_read()
        self.consumed.count += is_due
        return is_due


_KEPT = KeptGradients()


class LinkedBlock:
    """One block's gradients linked to its masters for a step; used on the optimizer's thread.

    `ticket`: the turn on the gradients, entered when the step first reads one of them. A failed step leaves the
    weights that devices read unchanged, since they are published only after the step function has returned.
    `weights`: the turn to publish the result in, if the step publishes at its end. Masters in halves without a
    second block are updated in place in this turn, so a failed step leaves torn weights.

    `arriving`: these gradients as the step gets them. `results`: takes what it makes of them. `share`: exchanges
    values with other machines, if there are some. `release`: whether the step releases the gradients by itself.
    """

    def __init__(
        self,
        state: ModelState,
        block: Block,
        ticket: Ticket,
        arriving: StepGradients,
        results: Results,
        share: MasterExchange | None,
        tracer: Tracer = SILENT,
        weights: Ticket | None = None,
        release: KeptGradients = _KEPT,
    ) -> None:
        self._release = release
        # The parameters whose gradients it has not read yet; without all, a step during backward fails.
        self._unread: set[int] = set()
        self._weights = weights
        self._writes_in_place = False
        self._thread = 0
        # Whether the step had updated any master when they were unlinked.
        self._has_changed = False
        self._arriving = arriving
        self._results = results
        self._share = share
        self._tracer = tracer
        self.block = block
        self.gradient = block.gradient
        self._state = state
        self._ticket = ticket
        self._arrived = False
        self._linked: list[torch.nn.Parameter] = []
        self._versions: list[int] = []
        # How long the step waited for these gradients.
        self.waited_s = 0.0
        # After the step function: the parameters whose gradients it has dropped, whichever machine owns them.
        self.dropped: list[int] = []

    def of(self, state: ModelState) -> bool:
        """Return whether the block is this model's."""
        return self._state is state

    @property
    def is_consumed(self) -> bool:
        """Whether the step runs during backward, so that it consumes the gradients."""
        return self._release.consumes

    def masters(self) -> list[torch.nn.Parameter]:
        """Return the master weights of the block's parameters, in the block's order."""
        return [self._state.masters[parameter] for parameter in self.block.tensors]

    def link(self) -> None:
        """Link every master to its place in the gradient block."""
        # A failed step may have left results.
        self.block.begin_results()
        self._thread = threading.get_ident()
        for index, master in enumerate(self.masters()):
            link(
                master,
                partial(self._arriving.source, index),
                partial(self._destination, index),
                self._ready,
                partial(self._note_complete, index),
                self._share,
                self._release.number,
                partial(self._note_stepped, index),
                # In a step during backward all others are refused, see `_refuse_inside`.
                only_here=not self._release.consumes,
            )
            self._linked.append(master)
            self._versions.append(master._version)

    def has_changed(self) -> bool:
        """Return whether the step has updated any of the masters."""
        versions = [master._version for master in self._linked]
        return self._has_changed or bool(self.block.complete) or versions != self._versions

    def changed(self) -> set[int]:
        """The indices of the masters that the step has updated."""
        now = [master._version for master in self._linked]
        written = {index for index, version in enumerate(now) if version != self._versions[index]}
        return written | set(self.block.complete)

    def note_left(self, indices: set[int], values: Sequence[torch.Tensor | object | None]) -> None:
        """The step has left gradients that it has used; some were left by the step before, and so used again."""
        again = [values[index] for index in indices & self.gradient.left]
        # What was set to zero counts as dropped.
        if any(bool(value.any()) if isinstance(value, torch.Tensor) else True for value in again):
            self._state.reuses_gradients = True
        self.gradient.left |= indices

    def end(self) -> list[torch.Tensor | object | None]:
        """Unlink the masters; return the result of `rp_optim.unlink` for each."""
        self._has_changed = self.has_changed()
        masters, self._linked, self._versions = self._linked, [], []
        self.dropped = [
            index for index, master in enumerate(masters) if (link := link_of(master)) and link.is_dropped
        ]
        with reading():
            remains: list[torch.Tensor | object | None] = [unlink(master) for master in masters]
        return self._arriving.remaining(remains)

    def drop(self) -> None:
        """Unlink the masters and ignore what the step function did to the gradients."""
        for master in self._linked:
            master.grad = None
        self.end()

    def arrive(self) -> None:
        """Block until all tasks that add to these gradients have done so."""
        if self._arrived:
            return
        begun = time.perf_counter()
        with self._waiting():
            self._arriving.wait()
        self.waited_s += time.perf_counter() - begun
        self._arrived = True
        if held := self.gradient.blocks():
            written = [*held, *self.block.written_tensors()] if self.block.has_back else held
            self._state.backend.host_touch(read=held, write=written, what="the step's gradients")
        self._unread = set(self.gradient.written)
        if not self._unread:
            self.consume()

    def consume(self) -> None:
        """In a step during backward, release the gradients, so that the next block's can use their memory."""
        if self._release.is_due():
            self.gradient.drop()
            self._ticket.leave()

    def refuse_unread(self) -> None:
        """Raise if the optimizer has stepped without reading a gradient of this block, which would be lost."""
        if self._unread:
            raise RoundPipeError(
                f"the optimizer has not read {len(self._unread)} of the gradients of {self.block}, as when code "
                "sets .grad to None while forward_backward(optimizer=...) steps; with step_in_backward=True they "
                "would be lost, so omit zero_grad() and the like, or freeze the parameters that are not trained"
            )

    def _note_stepped(self, index: int) -> None:
        master = self._linked[index]
        if self._writes_in_place and is_split(master):
            self.block.note_result(index, master._version)
        self._unread.discard(index)
        if not self._unread:
            self.consume()

    def _waiting(self) -> AbstractContextManager[None]:
        name = f"wait for the gradients of {self.block}"
        return self._tracer.on_host(OPTIMIZER, "wait", name, reason="gradients")

    def _ready(self, wait: bool, /) -> bool:
        self._refuse_inside()
        if not self._arrived:
            if not (wait or self._arriving.done()):
                return False
            self._refuse_early()
            self.arrive()
        self.check_complete()
        return True

    def _refuse_inside(self) -> None:
        # The call would wait for itself.
        if self._release.consumes and threading.get_ident() != self._thread:
            raise RoundPipeError(
                f"the gradients of {self.block} were requested while forward_backward(optimizer=...) steps: a "
                "loss function, a layer, a hook or another thread cannot read them or step the optimizer, which "
                "steps in this call by itself; omit that, or wrap the model without step_in_backward"
            )

    def _refuse_early(self) -> None:
        if self._release.may_read():
            return
        raise RoundPipeError(
            f"the gradients of {self.block} were requested before those of later layers were consumed, but with "
            "step_in_backward=True they are not in memory together, so they cannot be clipped, logged or omitted "
            "from the step; wrap the model without it for that"
        )

    def check_complete(self) -> None:
        """Raise `Incomplete` if a run that adds to the gradients has failed."""
        self._arriving.check_complete()

    def _destination(self, index: int) -> torch.Tensor | None:
        if not self.block.has_back:
            return self._in_place(index) if is_split(self._linked[index]) else None
        # A parameter with other strides, such as channels-last, is written when it is published.
        there = self.block.results.values[index]
        return there if there.is_contiguous() else None

    def _in_place(self, index: int) -> torch.Tensor:
        """Return the weight that calls read, after all calls that were launched before the step have read it."""
        if not self._writes_in_place:
            assert self._weights is not None
            begun = time.perf_counter()
            name = f"wait for readers of the weights of {self.block}"
            with self._tracer.on_host(OPTIMIZER, "wait", name, reason="readers"):
                self._weights.enter()
            self.waited_s += time.perf_counter() - begun
            self._state.backend.host_touch(write=self.block.written_tensors(), what="updating weights in place")
            self._writes_in_place = True
        return self.block.values[index]

    def is_torn(self) -> bool:
        """Return whether the step has begun to update weights in place."""
        return self._writes_in_place and self.has_changed()

    def _note_complete(self, index: int) -> None:
        # Here rather than in publication, for which calls wait.
        self.block.note_result(index, self._linked[index]._version)
        self.block.complete[index] = self._linked[index]._version
        self._results.note_complete(self.block, index)


def unlink_all(linked_blocks: Sequence[LinkedBlock]) -> None:
    """Unlink all masters. Gradients that the step function left in ``.grad`` go on accumulating, as in torch."""
    moved: list[tuple[Gradient, int, torch.Tensor]] = []
    if any(linked.is_consumed for linked in linked_blocks):
        _drop_all(linked_blocks)
        return
    for linked in linked_blocks:
        # The step function may have dropped it unread: it must be complete before it can be dropped.
        linked.arrive()
        linked.check_complete()
    for linked in linked_blocks:
        changed, values = linked.changed(), linked.end()
        linked.note_left({index for index in changed if values[index] is not None}, values)
        for index, remains in enumerate(values):
            if remains is None:
                linked.gradient.drop((index,))
            elif isinstance(remains, torch.Tensor):
                # It may be a view of another parameter's gradient: read all before writing any.
                moved.append((linked.gradient, index, remains.clone()))
    for gradient, index, value in moved:
        gradient.put(index, value)


def _drop_all(linked_blocks: Sequence[LinkedBlock]) -> None:
    """End a step during backward: release all gradients. Raises if the step has not read some of them."""
    for linked in linked_blocks:
        linked.arrive()
        linked.check_complete()
        linked.refuse_unread()
        linked.consume()
    for linked in linked_blocks:
        linked.drop()


def abandon(linked_blocks: Iterable[LinkedBlock]) -> None:
    """Unlink the masters after a failed step, and leave the gradients unchanged."""
    for linked in linked_blocks:
        linked.drop()
