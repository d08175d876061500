"""Telling whether a device ran out of memory, and freeing what the error holds."""

from __future__ import annotations

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
    behind: list[BaseException | None] = [error]
    seen: set[int] = set()
    while behind:
        one = behind.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            behind += (one.__cause__, one.__context__)
