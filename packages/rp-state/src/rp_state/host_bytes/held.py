"""What models hold of host memory now."""

from __future__ import annotations

from collections.abc import Sequence

from rp_state.block import Block
from rp_state.host_bytes.kinds import HostBytes, added
from rp_state.master import is_split, master_bytes
from rp_state.model_state import ModelState


def held_by(states: Sequence[ModelState]) -> HostBytes:
    """What these models hold now, without the optimizers' state and activations."""
    masters = sum(map(_held_masters_bytes, states))
    return added(_held(block) for state in states for block in state.blocks) + HostBytes(masters=masters)


def _held_masters_bytes(state: ModelState) -> int:
    trained, found = set(state.trainable_tensors()), list(state.masters.items())
    # Of parameters that are frozen now, masters in halves have an upper one of their own.
    own = (one.upper.nbytes for tensor, one in found if tensor not in trained and is_split(one))
    on_disk = 0 if state.remainders is None else state.remainders.memory_bytes
    return sum(master_bytes(one) for _, one in found) + sum(own) + on_disk


def given_to(states: Sequence[ModelState]) -> int:
    """Bytes that the backend allocated for these models' blocks; tensors left in their own memory do not count."""
    # Blocks may be allocated or released by other threads meanwhile.
    blocks = [block for state in states for block in state.blocks]
    return sum(block.host.allocated_bytes for block in blocks) + sum(
        _beside_weights(block).total for block in blocks
    )


def _held(block: Block) -> HostBytes:
    nbytes = 0 if block.on_disk else sum(tensor.nbytes for tensor in block.host_tensors())
    own = HostBytes(buffers=nbytes) if block.kind == "buffer" else HostBytes(weights=nbytes)
    return own + _beside_weights(block)


def _beside_weights(block: Block) -> HostBytes:
    """Bytes of the second block, of codes, and of the gradients."""
    return HostBytes(
        second_blocks=block.results.allocated_bytes if block.has_back else 0,
        codes=block.codes.nbytes,
        gradients=block.gradient.nbytes,
    )
