"""`HostCodes`: the FP8 codes of one model's weights on the host, between calls."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rp_state.block import Block
from rp_state.model_state import ModelState

from rp_engine.engine.memory.memory_check import HostMemoryCheck
from rp_engine.runtime.tickets import own_turn


class HostCodes:
    """Makes codes that are missing or stale. `drain`: waits for all steps and tasks launched before."""

    def __init__(self, state: ModelState, memory_check: HostMemoryCheck, drain: Callable[[], None]) -> None:
        self._state = state
        self._memory_check = memory_check
        self._drain = drain
        # The latest call that read codes did not train.
        self._was_evaluated = False

    def ready(self, blocks: Collection[Block], *, training: bool) -> None:
        """Have the codes of these blocks' weights be those of the weights that the next call reads.

        Calls that do not train, and the next one that does, look for weights that were written past their version
        counters, as by ``weight.data.copy_``.

        Raises `HostMemoryShort` if they have none yet, and there is no memory for them.
        """
        if not all(block.codes.are_there for block in blocks):
            self._memory_check.check_codes(self._state)
            self._drain()
            self._state.make_codes()
        # Averaged weights are put in place so to be evaluated, and the trained ones put back. Otherwise in
        # training the next step would undo it anyway, and waiting for the optimizer here would cost time.
        looks, self._was_evaluated = not training or self._was_evaluated, not training
        if looks and not all(map(self._fits, blocks)):
            self._state.note_rewritten()
        for block in blocks:
            if block.codes.stale:
                # At the first call, and after code outside has written weights: publication keeps them current.
                with own_turn(block.turns, write=True):
                    self._state.backend.host_touch(
                        read=block.host_tensors(), write=block.codes.memories, what="codes of weights"
                    )
                    block.codes.renew(block.values)

    def _fits(self, block: Block) -> bool:
        if block.codes.stale:
            return True
        with own_turn(block.turns, write=False):
            self._state.backend.host_touch(read=block.read_tensors(), what="a sample of codes")
            return block.codes.fits(block.values)
