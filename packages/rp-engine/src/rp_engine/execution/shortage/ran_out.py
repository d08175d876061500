"""Telling whether a device ran out of memory, and freeing what the error holds."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

from rp_transfer import is_out_of_memory


def shortage_of(body: Callable[[], None]) -> BaseException | None:
    """Run `body`; return its error if a device ran out of memory, without what its frames held. Raise others.

    >>> shortage_of(lambda: None) is None
    True
    """
    try:
        body()
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        clear_frames(error)
        return error
    return None


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes: their tensors would keep device memory allocated."""
    for one in _with_causes(error):
        traceback.clear_frames(one.__traceback__)


def drop_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error that nobody will see, and those of its causes.

    Cleared frames still hold their functions, whose closures (``lambda: loss_fn(output, label)``) hold tensors.
    """
    for one in _with_causes(error):
        one.__traceback__ = None
    # Frames may be in cycles.
    gc.collect()


def _with_causes(error: BaseException) -> list[BaseException]:
    behind: list[BaseException | None] = [error]
    found: dict[int, BaseException] = {}
    while behind:
        one = behind.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            behind += (one.__cause__, one.__context__)
    return list(found.values())
