"""What a program lends to packing: its threads, and its knowledge of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _alone(num_threads: int, body: Callable[[], None], skip_the_rest: Callable[[], None]) -> None:
    """Run the body on the calling thread, which does all the work then."""
    del num_threads, skip_the_rest
    body()


def _is_out_of_memory(error: BaseException) -> bool:
    # Triton has no class for it: "Triton Error [CUDA]: out of memory".
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


@dataclass(frozen=True, slots=True)
class Services:
    """Functions of the program that uses this package, which alone knows its threads and its allocators.

    Attributes:
        run_on_threads: ``run_on_threads(num_threads, body, skip_the_rest)`` calls ``body`` on at most so many
            threads at once, returns when all have ended, and raises the first error. All bodies take from one
            queue, so a single one does all the work, too. After an error or Ctrl-C it calls ``skip_the_rest``,
            which empties the queue, before it waits. Default: the calling thread.
        is_out_of_memory: whether an error says that a device has no memory left. Default: torch's errors and
            Triton's.

    >>> Services().is_out_of_memory(ValueError("no"))
    False
    """

    run_on_threads: Callable[[int, Callable[[], None], Callable[[], None]], None] = _alone
    is_out_of_memory: Callable[[BaseException], bool] = _is_out_of_memory


# One for the process: weights are expanded inside any operation of torch, where nobody can pass an argument.
_services = Services()


def lend(services: Services) -> None:
    """Use these services from now on, in the whole process.

    >>> lend(Services())
    """
    global _services
    _services = services


def lent() -> Services:
    """Return the services in use."""
    return _services
