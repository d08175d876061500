"""Send new weights from the machines that own them to all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from rp_dist import DistError, Work
from rp_engine.connecting import GATHER, SILENT, Block, ModelState, Tracer, is_split
from rp_engine.errors import AloneOnly, in_words
from rp_transfer import Ticket

from rp_machines.group import MachineGroup

# A publication holds the turns of at most this many blocks while their weights arrive from other machines.
_HELD = 3


class Copies:
    """Transfers of one block's new weights, in pieces that have one owner each; used on one thread at a time.

    Pieces of other owners are received from the start; this machine's own pieces are sent when they are complete.
    """

    def __init__(self, group: MachineGroup, block: Block) -> None:
        self._group = group
        self._block = block
        self._pieces = block.gathered()
        self._number = group.count_gathered(len(self._pieces))
        # By piece; one that was sent too early has a further transfer.
        self._works: dict[int, list[Work]] = {}
        self._is_stale: set[int] = set()
        for place, (owner, _) in enumerate(self._pieces):
            if owner != group.rank:
                self._launch(place, self._number + place)

    def _launch(self, place: int, number: int) -> None:
        owner, piece = self._pieces[place]
        self._works.setdefault(place, []).append(self._group.gather(piece, owner, number))

    def note_complete(self, index: int) -> None:
        """Note that a parameter's result is in the second block; send its segment if all results are."""
        place = next(at for at, segment in enumerate(self._block.segments) if index in segment.indices)
        if place in self._works:
            # Updated again by another optimizer, or by another step, in the same step function.
            self._is_stale.add(place)
        elif all(each in self._block.complete for each in self._block.segments[place].indices):
            self._launch(place, self._number + place)

    def stale(self, is_stale: Callable[[int], bool]) -> list[int]:
        """Return the segments whose parameters were changed after they were sent. `is_stale`: by index."""
        changed = {
            place
            for place in self._works
            if self._pieces[place][0] == self._group.rank
            and any(map(is_stale, self._block.segments[place].indices))
        }
        return sorted(self._is_stale | changed)

    def send_rest(self) -> None:
        """Send the pieces that were not sent yet."""
        for place in range(len(self._pieces)):
            if place not in self._works:
                self._launch(place, self._number + place)

    def send_again(self, place: int) -> None:
        """Send a segment once more, on all machines."""
        for work in self._works[place]:
            work.wait()
        self._launch(place, self._group.count_gathered(1))

    def wait(self) -> None:
        """Wait until all pieces have arrived here, and this machine's pieces elsewhere."""
        for work in self._all():
            work.wait()

    def _all(self) -> list[Work]:
        return [work for works in self._works.values() for work in works]

    def tell(self, tracer: Tracer) -> None:
        """Trace the transfers that this machine has sent."""
        for place, (owner, piece) in enumerate(self._pieces):
            for work in self._works[place] if owner == self._group.rank else ():
                if work.ended_s is not None:
                    name = f"weights of {self._block}"
                    tracer.past(GATHER, "gather", name, work.launched_s, work.ended_s, piece.nbytes)


class Gathering:
    """The new weights of one model; used on the optimizer's thread, or while that thread is idle.

    With a second block, weights arrive in it while devices read the first, each segment as soon as a step has
    updated its parameters. Without one, they arrive in the block's turn.
    """

    def __init__(self, group: MachineGroup, state: ModelState) -> None:
        self._group = group
        self._state = state
        self._under_way: dict[Block, Copies] = {}

    # A step, with second blocks

    def expect(self) -> None:
        """Begin a step: from now on, receive its results in the second blocks."""
        for block in self._state.trainable:
            if block.has_back and block not in self._under_way:
                self._under_way[block] = Copies(self._group, block)

    def note_complete(self, block: Block, index: int) -> None:
        """Note that a parameter's result is in the second block."""
        if (copies := self._under_way.get(block)) is not None:
            copies.note_complete(index)

    def changed(self) -> list[list[int]]:
        """Return, for each block, the segments that this machine must send again after all have taken the step."""
        return [copies.stale(self._is_stale(block)) for block, copies in self._under_way.items()]

    def _is_stale(self, block: Block) -> Callable[[int], bool]:
        masters = self._masters(block)
        return lambda index: block.complete.get(index) != masters[index]._version

    def complete(self, changed: Sequence[Sequence[Sequence[int]]]) -> None:
        """Complete a step that all machines have taken: send the rest, and again the segments that changed.

        `changed`: from each machine, what its own `changed` has returned.
        """
        try:
            self._complete(changed)
        except BaseException as error:
            self._group.break_off(error)
            raise

    def _complete(self, changed: Sequence[Sequence[Sequence[int]]]) -> None:
        for block, copies in self._under_way.items():
            block.write(self._state.backend, self._masters(block))
            copies.send_rest()
        for number, copies in enumerate(self._under_way.values()):
            for place in sorted(place for machine in changed for place in machine[number]):
                copies.send_again(place)

    def give_up(self) -> None:
        """After a failed step, send the pieces that other machines wait for, although nobody uses them."""
        copies = [self._under_way.pop(block) for block in list(self._under_way)]
        # If a machine was lost, the step has raised that.
        with suppress(DistError):
            for each in copies:
                each.send_rest()
            for each in copies:
                each.wait()

    def skip(self) -> None:
        """Send the pieces that other machines wait for, as `give_up` does, if a step could not begin here."""
        with suppress(DistError):
            self.wait()
            self._under_way.clear()
            self.expect()
            self.give_up()

    def _masters(self, block: Block) -> list[torch.Tensor]:
        return [self._state.masters[parameter] for parameter in block.tensors]

    # Publication

    def publish(
        self, turns: Mapping[Block, Ticket], enter: Callable[[Block, Ticket], None], tracer: Tracer = SILENT
    ) -> None:
        """Publish each block in its turn, a few at a time; `enter` waits for a turn.

        After a failed step nothing is published: the masters are a mixture of old and new.
        """
        held: deque[tuple[Block, Ticket]] = deque()
        begun: set[Block] = set()
        published = 0
        try:
            for block, ticket in turns.items():
                enter(block, ticket)
                if self._state.health.has_whole_step:
                    self._begin(block)
                begun.add(block)
                held.append((block, ticket))
                if len(held) == _HELD:
                    self._finish(*held.popleft(), tracer)
                    published += 1
            while held:
                self._finish(*held.popleft(), tracer)
                published += 1
        except BaseException as error:
            if published or not all(block.has_back for block, _ in held):
                self._state.health.note_half_published(in_words(error))
            if any(block not in begun and block not in self._under_way for block in turns):
                self._group.break_off(error)
            raise

    def _begin(self, block: Block) -> None:
        if block in self._under_way:
            return
        block.write(self._state.backend, self._masters(block))
        copies = self._under_way[block] = Copies(self._group, block)
        copies.send_rest()

    def _finish(self, block: Block, ticket: Ticket, tracer: Tracer) -> None:
        is_there = self._wait(block, tracer)
        if is_there and self._state.health.has_whole_step:
            self._refuse_changed(block)
            block.swap()
        ticket.leave()

    def _wait(self, block: Block, tracer: Tracer) -> bool:
        """Wait for a block's weights; returns whether they were under way."""
        copies = self._under_way.pop(block, None)
        if copies is None:
            return False
        copies.wait()
        copies.tell(tracer)
        self._state.backend.host_touch(write=block.written_tensors(), what="weights from other machines")
        return True

    def _refuse_changed(self, block: Block) -> None:
        """Refuse parameters that were changed after the step, since other machines have the step's result."""
        masters = self._masters(block)
        if any(masters[index]._version != version for index, version in block.complete.items()):
            raise AloneOnly(
                f"optimizer's parameters of {block} were changed after their step, when other machines had its "
                "result already; change them in the step function"
            )

    # Between steps

    def take_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Publish these parameters' values, too: on every machine, their masters were just set from them."""
        chosen = set(parameters)
        for block in list(self._under_way):
            self._take_over(block, [index for index, one in enumerate(block.tensors) if one in chosen])

    def _take_over(self, block: Block, indices: Iterable[int]) -> None:
        self._under_way[block].wait()
        masters = self._masters(block)
        for index in indices:
            with torch.no_grad():
                block.results.values[index].copy_(block.tensors[index])
            if is_split(master := masters[index]):
                master.move_to(block.results.values[index])
            block.note_result(index, masters[index]._version)
            block.complete[index] = masters[index]._version

    def apart(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the last step's result for each trained parameter, from second blocks that calls do not read yet.

        Raises `AloneOnly` if this machine has not all of them: without second blocks they come in a publication.
        """
        if any(block not in self._under_way for block in self._state.trainable):
            raise AloneOnly(
                "the last step's result is not on this machine yet, which has no second blocks for all weights: "
                "call synchronize() on all machines first, after which each may read a state dict or save alone; "
                "or wrap the model with double_buffer=True"
            )
        self.wait()
        values: dict[torch.Tensor, torch.Tensor] = {}
        for block in self._under_way:
            self._refuse_changed(block)
            self._state.backend.host_touch(read=block.results.memories, what="a state dict")
            values.update(zip(block.tensors, block.results.values, strict=True))
        return values

    def wait(self) -> None:
        """Wait until the results that are under way are in the second blocks."""
        for copies in self._under_way.values():
            copies.wait()
