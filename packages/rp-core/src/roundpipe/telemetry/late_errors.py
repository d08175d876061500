"""Errors that come when no call of their model is there to raise them; what is left of them is told at the end.

A library prints nothing; but when the process ends, no later call can raise what failed, and it would be as if it
had not.
"""

from __future__ import annotations

import os
import sys
import traceback

from roundpipe.errors import in_words

_TITLE = (
    "roundpipe: this failed after the last call of its model, so that nothing could raise it; call synchronize() "
    "at the end of the program:\n"
)


class Late:
    """The place for one piece of work's error, which is kept in words: errors hold all that their frames hold.

    >>> late = Late()
    >>> late.note(ValueError("no"))
    >>> untold()
    ['ValueError: no\\n']
    >>> late.tell()
    >>> untold()
    []
    """

    def note(self, error: BaseException) -> None:
        """It failed."""
        _UNTOLD[self] = _report(error)

    def tell(self) -> None:
        """The error, if there is one, is handed to the user."""
        _UNTOLD.pop(self, None)


def untold() -> list[str]:
    """What has failed and was not told, the oldest first."""
    return list(_UNTOLD.values())


def tell_the_rest() -> None:
    """Write to standard error what is left; as the process ends."""
    for report in untold():
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - without a terminal there may be none
            sys.stderr.write(f"{_TITLE}{report}")
    _UNTOLD.clear()


def _report(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{in_words(error)}\n"


_UNTOLD: dict[Late, str] = {}
# A forked child tells nothing of its parent's.
os.register_at_fork(after_in_child=_UNTOLD.clear)
