"""New weights on their way from the machines that own them to all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
from rp_dist import Work
from rp_transfer import Ticket

from roundpipe.errors import AloneOnly
from roundpipe.runtime.machines import MachineGroup
from roundpipe.state.model_state import Block, ModelState

# How many blocks' turns a publication holds while their weights come from other machines.
_HELD = 3


class Gathering:
    """The new weights of one model; used on the optimizer's thread, or when that has nothing to do.

    With a second block they come there while devices read the first; without one, in the block's turn.
    """

    def __init__(self, group: MachineGroup, state: ModelState) -> None:
        self._group = group
        self._state = state
        self._under_way: dict[Block, list[Work]] = {}

    def begin(self) -> None:
        """Begin to gather a step's result, as far as there are second blocks for it."""
        for block in self._state.trainable:
            if block.back is not None:
                self._begin(block)

    def _begin(self, block: Block) -> None:
        if block in self._under_way:
            return
        block.write(self._state.backend, self._masters(block))
        self._under_way[block] = [self._group.gather(piece, owner) for owner, piece in block.gathered()]

    def _masters(self, block: Block) -> list[torch.Tensor]:
        return [self._state.masters[parameter] for parameter in block.tensors]

    def publish(self, turns: Mapping[Block, Ticket], enter: Callable[[Block, Ticket], None]) -> None:
        """Publish each block in its turn, a few at a time; `enter` waits for a turn.

        After a failed step nothing is published: the masters are a mixture of old and new.
        """
        held: deque[tuple[Block, Ticket]] = deque()
        for block, ticket in turns.items():
            enter(block, ticket)
            if self._state.failed is None:
                self._begin(block)
            held.append((block, ticket))
            if len(held) == _HELD:
                self._finish(*held.popleft())
        while held:
            self._finish(*held.popleft())

    def _finish(self, block: Block, ticket: Ticket) -> None:
        is_there = self._wait(block)
        if is_there and self._state.failed is None:
            self._refuse_changed(block)
            block.swap()
        ticket.leave()

    def _wait(self, block: Block) -> bool:
        """Wait for a block's weights; returns whether they were under way."""
        works = self._under_way.pop(block, None)
        for work in works or ():
            work.wait()
        if works is None:
            return False
        written = block.host_tensors() if block.back is None else (block.back,)
        self._state.backend.host_touch(write=written, what="weights from other machines")
        return True

    def _refuse_changed(self, block: Block) -> None:
        """The others have what the step left."""
        masters = self._masters(block)
        if any(masters[index]._version != version for index, version in block.complete.items()):
            raise AloneOnly(
                f"optimizer's parameters of {block} were changed after their step, when other machines had its "
                "result already; change them in the step function"
            )

    def take_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """The masters of these parameters were just set from them, on every machine: publish that, too."""
        chosen = set(parameters)
        for block in list(self._under_way):
            self._take_over(block, [index for index, one in enumerate(block.tensors) if one in chosen])

    def _take_over(self, block: Block, indices: Iterable[int]) -> None:
        for work in self._under_way[block]:
            work.wait()
        masters = self._masters(block)
        for index in indices:
            with torch.no_grad():
                block.back_values[index].copy_(block.tensors[index])
            block.complete[index] = masters[index]._version

    def wait(self) -> None:
        """Wait until the results that are under way are in the second blocks."""
        for works in self._under_way.values():
            for work in works:
                work.wait()

    def settle(self) -> None:
        """Wait for everything that is under way, and forget it."""
        for block in list(self._under_way):
            self._wait(block)
