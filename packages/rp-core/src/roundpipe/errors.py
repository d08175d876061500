"""Every error the engine itself raises; what a layer or a step function raises arrives as it is.

::

    RoundPipeError (RuntimeError)
    ├── Busy                  a call while another one is being launched, or from a worker's thread
    ├── Stale                 backward through weights that were replaced since forward
    ├── GradientsIncomplete   a call failed and left part of its gradients
    └── StepFailed            a step function failed and left part of its update
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class RoundPipeError(RuntimeError):
    """Base of the engine's own errors."""


class Busy(RoundPipeError):
    """The engine takes one call at a time, from one thread, and none from inside its own work."""


class Stale(RoundPipeError):
    """The weights that forward read have been replaced, so its backward cannot be run any more."""


class GradientsIncomplete(RoundPipeError):
    """A training call failed half-way; its gradients must be dropped before training goes on."""


class StepFailed(RoundPipeError):
    """A step failed half-way; the optimizer's parameters must be reset or loaded before training goes on."""


# What users raise may be of any class: its `repr`, and what notes are added by, may fail in any way. Whoever tells
# of an error has others to wake, so no description fails.


def in_words(error: BaseException) -> str:
    """An error in words.

    >>> in_words(ValueError("no"))
    "ValueError('no')"
    """
    try:
        return repr(error)
    except BaseException:
        return f"{type(error).__name__} (whose repr fails)"


def add_note(error: BaseException, words: str) -> None:
    """Add a note to an error; to the log if the error takes none."""
    try:
        error.add_note(words)
    except BaseException:
        _LOG.warning("%s takes no note; it would be: %s", in_words(error), words)
