"""One model's gradients on the host between calls, as users see them in ``.grad``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rp_optim.masters import own_grad
from rp_sched import Task
from rp_state.block import Block
from rp_state.grad_attribute.exposure import Exposure
from rp_state.model_state import ModelState
from rp_state.telling.gradients import tell_absent

from rp_engine.errors import RoundPipeError
from rp_engine.peers.peers import SharedModel
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import own_turn


class HostGradients:
    """One model's gradients between calls and steps. Call every method on the launcher's thread.

    `additions`: how many tasks launched since the last step add to each block's gradients.
    """

    def __init__(self, name: str, state: ModelState, runtime: Runtime, shared: SharedModel) -> None:
        self.additions: Counter[Block] = Counter()
        self._name = name
        self._state = state
        self._peers = runtime.peers
        self._shared = shared
        self._exposure = Exposure()

    def added_by(self, tasks: Sequence[Task]) -> Counter[Block]:
        """Return how many of these tasks add to each block's gradients."""
        return Counter(block for task in tasks if task.adds_gradients for block in self._trained_in(task.layers))

    def _trained_in(self, layers: range) -> set[Block]:
        blocks = {block for layer in layers for block in self._state.layers[layer].blocks}
        return {block for block in blocks if block.kind == "trainable"}

    def keep_divided_apart(self, tasks: Sequence[Task]) -> None:
        """If the optimizer steps in this call, give gradients that several tasks add to memory of their own."""
        if self._state.options.steps_in_backward:
            for block in [block for block, count in self.added_by(tasks).items() if count > 1]:
                block.gradient.move_out()

    def keep_additions(self, kept: Sequence[Block]) -> None:
        """Keep what was added to these blocks, and what others, which were built anew, have of their old ones."""
        before = self.additions
        self.additions = Counter({block: before[block] for block in kept if block in before})
        self.additions.update(
            block for block in self._state.trainable if block not in kept and block.gradient.written
        )

    def show(self) -> None:
        """Set ``.grad`` on every trainable parameter, unless gradients are incomplete; no task may be running."""
        # With several machines these are parts of sums that their owners have.
        state = self._state
        if state.health.has_all_gradients and self._peers.is_alone and not state.options.steps_in_backward:
            self._exposure.show(self._state.trainable)
            state.shows_gradients = True

    def collect(self) -> None:
        """Take back what was shown, and add what code outside the engine, such as a penalty, put into ``.grad``.

        Raises `RoundPipeError` if there is some, but the optimizer steps in each call.
        """
        self._take_back()
        for block in self._state.trainable:
            found = [index for index, tensor in enumerate(block.tensors) if own_grad(tensor) is not None]
            if found:
                self._collect(block, found)

    def _take_back(self) -> None:
        self._exposure.take_back()
        self._state.shows_gradients = False

    def _collect(self, block: Block, found: Sequence[int]) -> None:
        if self._state.options.steps_in_backward:
            raise RoundPipeError(
                f"a parameter of {block} of model {self._name!r} has a .grad from code outside of the "
                "engine, but with step_in_backward=True gradients are consumed as they arrive, and nothing "
                "can be added to them; set it to None, or wrap the model without step_in_backward"
            )
        self._shared.note_collected(block, found)
        if self._peers.rank:
            # All machines have computed the same: it counts once.
            for index in found:
                block.tensors[index].grad = None
            return
        with own_turn(block.gradient.turns, write=True):
            block.gradient.collect(found, block.tensors)

    def note_stepped(self) -> None:
        """Note that a step takes the gradients of all calls so far, and tell which of them it cannot."""
        tell_absent(self._name, self._state)
        self._state.absent.clear()
        self.additions.clear()
        self._shared.note_stepped()

    def drop(self) -> None:
        """Drop all gradients, also those of a failed call; no task may be running."""
        self.additions.clear()
        self._state.stepped_runs = self._state.num_runs
        self._state.absent.clear()
        self._shared.note_dropped()
        self._take_back()
        self._state.health.forget_gradients()
        for block in self._state.trainable:
            block.gradient.drop()

    def drop_all(self) -> None:
        """Like `drop`, with what code outside the engine has put into ``.grad`` since it was last collected."""
        self.drop()
        for block in self._state.trainable:
            for tensor in block.tensors:
                tensor.grad = None
