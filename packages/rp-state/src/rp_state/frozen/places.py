"""`FilePlaces`: which tensors lie in files already, our own or a checkpoint's."""

from __future__ import annotations

import os

import torch
from rp_optim.disk.system import System
from rp_transfer import FileRange, MappedFiles

from rp_state.frozen.files import FrozenFile
from rp_state.frozen.mapping import Stretch, all_stretches, stretches_at


class FilePlaces:
    """Where tensors lie in files at the moment.

    Tensors in a mapped file of a checkpoint count if that is on the disk of `beside`, which reads it; None: they
    do not. `files`: those that were opened before, by inode; new ones are added.
    """

    def __init__(
        self, files: MappedFiles, beside: FrozenFile | None, opened: dict[int, FrozenFile], system: System
    ) -> None:
        self._own = all_stretches()
        self._files = files
        self._beside = beside
        self._opened = opened
        self._system = system

    def of(self, tensor: torch.Tensor) -> list[Stretch] | None:
        """Return the stretches that hold a tensor's numbers, in order, without gaps; None if it is in no file."""
        if not tensor.nbytes:
            return []
        address = tensor.data_ptr()
        found = stretches_at(self._own, address, tensor.nbytes) or self._in_checkpoint(address, tensor)
        # Elements lie as in memory; a device must be able to read them where they come.
        is_usable = found is not None and all(each.offset % tensor.element_size() == 0 for each in found)
        return found if is_usable and is_dense(tensor) else None

    def _in_checkpoint(self, address: int, tensor: torch.Tensor) -> list[Stretch] | None:
        found = self._files.range_of(address, tensor.nbytes)
        file = None if found is None or self._beside is None else self._file(found, self._beside)
        if found is None or file is None:
            return None
        offset = address - found.start + found.offset
        return [Stretch(file, offset, tensor.nbytes, address, is_private=True)]

    def _file(self, found: FileRange, beside: FrozenFile) -> FrozenFile | None:
        if found.inode not in self._opened:
            try:
                descriptor = self._system.open(found.path, os.O_RDONLY, 0)
            except OSError:
                return None  # deleted meanwhile, or not this user's: it is copied out of its mapping
            told = os.fstat(descriptor)
            if told.st_ino != found.inode or told.st_dev != os.fstat(beside.descriptor).st_dev:
                os.close(descriptor)
                return None
            self._opened[found.inode] = beside.of_checkpoint(found.path, descriptor, self._system)
        return self._opened[found.inode]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie next to each other, in the order of its dimensions or another."""
    places = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != places:
            return False
        places *= size
    return True
