"""By how much memory grows while a model moves into its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from rp_transfer import BlockGroup, MappedFiles

from rp_state.layers import moves
from rp_state.options import HostOptions


def moving_groups(groups: Sequence[BlockGroup], options: HostOptions) -> list[BlockGroup]:
    """Those that move into blocks in memory."""
    return [found for found in groups if moves(found, options.pin, has_disk=options.frozen is not None)]


def growth(moving: Sequence[BlockGroup], files: MappedFiles) -> tuple[int, int]:
    """By how much memory grows while tensors move into blocks, one block at a time: at the end, and at most.

    Memory that a tensor leaves is freed, unless it is a file's, which was not in memory.
    """
    left = Counter(tensor.untyped_storage().data_ptr() for found in moving for tensor in found.tensors)
    grown = peak = 0
    for found in moving:
        grown += found.layout.nbytes
        peak = max(peak, grown)
        for storage in map(torch.Tensor.untyped_storage, found.tensors):
            left[storage.data_ptr()] -= 1
            if not left[storage.data_ptr()] and not files.covers(storage.data_ptr(), storage.nbytes()):
                grown -= storage.nbytes()
    return grown, peak
