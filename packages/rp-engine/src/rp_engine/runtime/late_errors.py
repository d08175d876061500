"""Errors of background work that no later call of the model has raised are printed when the process ends.

A library should not print, but at that point no later call can raise the error, and it would be lost.
"""

from __future__ import annotations

import os
import sys
import traceback

from rp_engine.errors import in_words

_TITLE = (
    "roundpipe: this failed after the last call of its model, so that nothing could raise it; call synchronize() "
    "at the end of the program:\n"
)


class UnreportedError:
    """Holds one piece of work's error as text, since an error object would keep its frames' objects alive.

    >>> late = UnreportedError()
    >>> late.note(ValueError("no"))
    >>> unreported()[-1]
    'ValueError: no\\n'
    >>> late.tell()
    >>> "ValueError: no\\n" in unreported()
    False
    """

    def note(self, error: BaseException) -> None:
        """Record that the work failed."""
        _UNREPORTED[self] = _report(error)

    def tell(self) -> None:
        """Note that the user has got the error, if there is one."""
        _UNREPORTED.pop(self, None)


def unreported() -> list[str]:
    """Return the errors that the user has not got, the oldest first."""
    return list(_UNREPORTED.values())


def report_remaining() -> None:
    """Write the remaining errors to standard error, when the process ends."""
    for report in unreported():
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - without a terminal there may be none
            sys.stderr.write(f"{_TITLE}{report}")
    _UNREPORTED.clear()


def _report(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{in_words(error)}\n"


_UNREPORTED: dict[UnreportedError, str] = {}
# A forked child does not report its parent's errors.
os.register_at_fork(after_in_child=_UNREPORTED.clear)
