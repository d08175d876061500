"""What the exceptions of RoundPipe's packages have in common, and words and notes for errors of any kind.

::

    RoundPipeError (RuntimeError)
    ├── Busy                  something that goes on once at a time, such as a call or a profile, was begun again
    └── AloneOnly             something that works on one machine alone was asked of several
    TrainingWarning (UserWarning)         a training loop that runs, but is unlikely to do what was meant
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class RoundPipeError(RuntimeError):
    """Base of RoundPipe's own errors."""


class Busy(RoundPipeError):
    """The engine accepts one call at a time, from one thread, and none from inside its own tasks or steps.

    A process takes one profile at a time.
    """


class AloneOnly(RoundPipeError):
    """The operation works on one machine only; the message says why, and what to do on several."""


class TrainingWarning(UserWarning):
    """A training loop that runs, but is unlikely to do what was meant; the message has the line to write."""


# User code may raise any class, whose `__repr__` or `add_note` may itself raise. These helpers never raise: their
# callers are handling an error and must still wake the threads that wait for them.


def in_words(error: BaseException) -> str:
    """An error's `repr`, or its class name if the `repr` fails.

    >>> in_words(ValueError("no"))
    "ValueError('no')"
    """
    try:
        return repr(error)
    except BaseException:
        return f"{class_name(error)} (whose repr fails)"


def class_name(error: BaseException) -> str:
    """The name of an error's class, also where a metaclass hides it.

    >>> class_name(ValueError("no"))
    'ValueError'
    """
    # `type(error).__name__` runs the code of a metaclass that has its own.
    return type.__dict__["__name__"].__get__(type(error))


def add_note(error: BaseException, words: str) -> None:
    """Add a note to an error; log the note if the error rejects it."""
    try:
        error.add_note(words)
    except BaseException:
        _LOG.warning("cannot add a note to %s; the note is: %s", in_words(error), words)
