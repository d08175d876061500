"""Counting of the memory that torch operations allocate on a virtual device with a limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Here(threading.local):
    is_paused = False


_HERE = _Here()


@contextmanager
def uncounted() -> Generator[None]:
    """What the calling thread allocates inside the context is no memory of a device, or counted already."""
    before, _HERE.is_paused = _HERE.is_paused, True
    try:
        yield
    finally:
        _HERE.is_paused = before


class Counting(TorchDispatchMode):
    """Counts the storages that torch operations make in the thread that enters it, until they are freed.

    `take(nbytes)` is called for each new storage, and may raise; `give(nbytes)` when it is freed, by a finalizer.
    What compiled layers allocate, and what an operation allocates only while it runs, is not seen.

    >>> held = []
    >>> with Counting(held.append, held.remove):
    ...     kept = torch.ones(5).view(5, 1) + 1
    >>> held
    [20]
    """

    def __init__(self, take: Callable[[int], None], give: Callable[[int], None]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._take = take
        self._give = give

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, then count what it has made."""
        del types
        found = func(*args, **(kwargs or {}))
        if not _HERE.is_paused:
            known = {storage.data_ptr() for storage in _storages((args, kwargs))}
            for storage in _storages(found):
                if storage.data_ptr() not in known:
                    known.add(storage.data_ptr())
                    self._count(storage)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._take(nbytes)
        weakref.finalize(storage, self._give, nbytes).atexit = False


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel():
            yield leaf.untyped_storage()
