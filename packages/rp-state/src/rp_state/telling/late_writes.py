"""`LateWrites`: whether code outside the engine writes weights while a backward pass still reads them."""

from __future__ import annotations

from collections.abc import Iterable, Set

from rp_errors import RoundPipeError

from rp_state.block import Block
from rp_state.model_state import ModelState


class LateWrites:
    """Notes how often code outside the engine had written some blocks, which a backward pass is going to read.

    `samples`: writes past version counters are seen, too, unless a step is running while there is no second block:
    it writes where calls read then.
    """

    def __init__(self, state: ModelState, blocks: Iterable[Block] = (), *, samples: bool = False) -> None:
        self._state = state
        self._counts = {block: block.writes_outside() for block in blocks}
        still = [block for block in self._counts if samples and self._is_still(block)]
        self._unseen = {block: block.unseen_writes() for block in still}

    def __bool__(self) -> bool:
        """Whether there are such blocks."""
        return bool(self._counts)

    def refuse(self, layers: Set[int]) -> None:
        """Raise `RoundPipeError` if blocks that these layers use were written since."""
        for block in self._counts:
            if not layers.isdisjoint(block.users) and self._is_written(block):
                raise RoundPipeError(
                    f"weights of {block} were written while the backward of a call still read them, so its "
                    "gradients are those of no weights; call model.synchronize() before you write weights, or "
                    "write them after a synchronous step. Drop these gradients (zero_grad; reset after a step)"
                )

    def _is_written(self, block: Block) -> bool:
        known = self._unseen.get(block)
        is_unseen = known is not None and not block.unseen_writes() <= known
        # Asked last: a step may have begun meanwhile.
        return block.writes_outside() != self._counts[block] or (is_unseen and self._is_still(block))

    def _is_still(self, block: Block) -> bool:
        return block.has_back or not self._state.is_stepping
