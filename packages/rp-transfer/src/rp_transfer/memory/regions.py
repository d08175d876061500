"""Pinning existing storages in place; storages that share a page are pinned together, as one region."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch

from rp_transfer.memory.pages import PAGE_BYTES, Pinned


class Region:
    """The address range ``[start, end)`` of some storages. It keeps them alive while their memory is pinned."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self.storages = storages
        self.start = storages[0].data_ptr()
        self.end = max(storage.data_ptr() + storage.nbytes() for storage in storages)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether all bytes of the storage lie in this region."""
        return self.start <= storage.data_ptr() and storage.data_ptr() + storage.nbytes() <= self.end

    def overlaps(self, storage: torch.UntypedStorage) -> bool:
        """Return whether any byte of the storage lies in this region."""
        return self.start < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < self.end


class Regions:
    """The pinned regions of one backend; each stays pinned while a caller references it."""

    def __init__(self, pinned: Pinned) -> None:
        self._pinned = pinned
        self._known: weakref.WeakSet[Region] = weakref.WeakSet()
        self._lock = threading.Lock()

    def register(self, tensors: Iterable[torch.Tensor]) -> tuple[Region, ...]:
        """Pin the tensors' storages. Return their regions, pinned now or before, without refused ones."""
        # Keyed by address; of storages that begin at the same address the largest.
        sized = sorted(map(torch.Tensor.untyped_storage, tensors), key=torch.UntypedStorage.nbytes)
        storages = {storage.data_ptr(): storage for storage in sized}
        with self._lock:
            known = list(self._known)
            held = [region for region in known if any(map(region.holds, storages.values()))]
            new = [storage for _, storage in sorted(storages.items()) if self._is_new(storage, known)]
            return (*held, *filter(self._pin, _by_page(new, known)))

    def _is_new(self, storage: torch.UntypedStorage, known: Iterable[Region]) -> bool:
        if self._pinned.covers(storage.data_ptr(), storage.nbytes()):
            return False
        return storage.nbytes() > 0 and not any(region.overlaps(storage) for region in known)

    def _pin(self, region: Region) -> bool:
        allowed = self._pinned.hold(region, region.start, region.end - region.start)
        if allowed:
            self._known.add(region)
        return allowed


def _by_page(storages: Iterable[torch.UntypedStorage], known: Sequence[Region]) -> list[Region]:
    """Group storages, sorted by address, into regions; a storage joins the region that ends on its first page."""
    runs: list[list[torch.UntypedStorage]] = []
    end = -1
    for storage in storages:
        start = storage.data_ptr()
        between = any(region.start < start and end < region.end for region in known)
        if runs and start // PAGE_BYTES <= (end - 1) // PAGE_BYTES and not between:
            runs[-1].append(storage)
        else:
            runs.append([storage])
        end = max(end, start + storage.nbytes())
    return [Region(run) for run in runs]
