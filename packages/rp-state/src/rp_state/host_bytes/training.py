"""What is still missing until a model in its blocks can be trained, and whether it will be."""

from __future__ import annotations

from collections.abc import Sequence

from rp_state.block import Block
from rp_state.halves import can_split
from rp_state.host_bytes.kinds import HostBytes, added
from rp_state.host_bytes.needed import gradient_bytes, needed_by
from rp_state.master import is_split
from rp_state.model_state import ModelState


def needed_to_train(states: Sequence[ModelState], additions: int = 1) -> HostBytes:
    """What training takes, with the second blocks that were decided for."""
    return added(
        needed_by(
            state.blocks,
            state.options,
            second_blocks=state.double_buffer is True,
            additions=additions,
            shards=state.shards,
            coded=state.coded,
        )
        + HostBytes(masters=_made_whole_bytes(state))
        for state in states
    )


def _made_whole_bytes(state: ModelState) -> int:
    """What masters that were to be in halves take more, because they were made whole."""
    trained = {
        tensor: value
        for block in state.trainable
        for tensor, value in zip(block.tensors, block.values, strict=True)
        if state.options.master == "split" and can_split(value)
    }
    masters = [state.masters[tensor] for tensor in trained if tensor in state.masters]
    return sum(master.nbytes // 2 for master in masters if not (master.is_meta or is_split(master)))


def is_complete(state: ModelState) -> bool:
    """Whether the model has all masters and second blocks that training takes."""
    has_masters = all(parameter in state.masters for parameter in state.trainable_tensors())
    has_second = all(block.has_back for block in state.trainable if block.host.is_one_piece)
    is_decided = state.double_buffer is not None or state.trains_halves()
    return has_masters and is_decided and (has_second or not state.double_buffer)


def will_train(state: ModelState) -> bool:
    """Whether the model will have gradients and masters: it has been stepped, or its options say so."""
    return bool(state.trainable) and (state.options.will_train or bool(state.masters))


def missing_gradients(block: Block, additions: int) -> int:
    """Bytes of gradient blocks that are not allocated yet."""
    if not block.gradient.counts:
        return 0
    return max(gradient_bytes(block, additions) - block.gradient.nbytes, 0)
