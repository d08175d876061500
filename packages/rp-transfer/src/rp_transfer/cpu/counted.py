"""Count the memory that torch operations allocate on a virtual device with a limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _ThreadState(threading.local):
    is_paused = False


_THREAD = _ThreadState()


@contextmanager
def uncounted() -> Generator[None]:
    """Do not count what the calling thread allocates inside this context: host memory, or counted elsewhere."""
    before, _THREAD.is_paused = _THREAD.is_paused, True
    try:
        yield
    finally:
        _THREAD.is_paused = before


class Counting(TorchDispatchMode):
    """Counts the storages that torch operations allocate in the thread that enters it, until they are freed.

    `allocated(nbytes)` is called for each new storage, and may raise. `freed(nbytes)` is called by a finalizer
    when the storage is freed. Allocations of compiled layers, and temporary ones inside an operation, are not
    seen.

    >>> held = []
    >>> with Counting(held.append, held.remove):
    ...     kept = torch.ones(5).view(5, 1) + 1
    >>> held
    [20]
    """

    def __init__(self, allocated: Callable[[int], None], freed: Callable[[int], None]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._allocated = allocated
        self._freed = freed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, then count its new storages."""
        del types
        result = func(*args, **(kwargs or {}))
        if not _THREAD.is_paused:
            known = {storage.data_ptr() for storage in _storages((args, kwargs))}
            for storage in _storages(result):
                if storage.data_ptr() not in known:
                    known.add(storage.data_ptr())
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._allocated(nbytes)
        weakref.finalize(storage, self._freed, nbytes).atexit = False


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel():
            yield leaf.untyped_storage()
