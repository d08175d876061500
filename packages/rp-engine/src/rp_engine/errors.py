"""The engine's own exceptions. What a layer or a step function raises reaches the caller unchanged.

::

    RoundPipeError (RuntimeError)
    ├── Busy                  a call while another one is being launched, or from a worker's thread
    ├── BoundaryError         what a layer writes or returns cannot cross to the next layer
    ├── Stale                 backward through weights that were replaced since forward
    ├── DifferentiatedTwice   a gradient of a gradient, of which a model keeps no graph
    ├── GradientsIncomplete   a call failed and left part of its gradients
    ├── StepFailed            a step function failed and left part of its update
    ├── HostMemoryShort       what a model, call or step needs does not fit into host memory
    ├── ImpureLayer           a layer changes more than its output, or does not compute the same again
    ├── TrainsNothing         an optimizer steps, but not the parameters that train
    ├── MachineFailed         a call or step failed on another machine of the group
    └── AloneOnly             something that works on one machine alone was asked of several
    HostMemoryWarning (RuntimeWarning)    what a model is likely to need does not fit
    DeviceMemoryWarning (RuntimeWarning)  a device ran out of memory, and the call went on in smaller parts
    TrainingWarning (UserWarning)         a training loop that runs, but is unlikely to do what was meant
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class RoundPipeError(RuntimeError):
    """Base of the engine's own errors."""


class Busy(RoundPipeError):
    """The engine accepts one call at a time, from one thread, and none from inside its own tasks or steps."""


class Stale(RoundPipeError):
    """The weights that forward read have been replaced, so its backward can no longer run."""


class BoundaryError(RoundPipeError):
    """A layer writes an input that shares memory with another tensor, or returns a tensor inside of an object.

    The message names the layer and the paths. It is raised whether or not the plan has a boundary there.
    """


class DifferentiatedTwice(RoundPipeError):
    """Gradients that a model returned under ``create_graph=True`` were differentiated; they have no graph."""


class GradientsIncomplete(RoundPipeError):
    """A training call failed part-way; drop its gradients before training on."""


class StepFailed(RoundPipeError):
    """A step failed part-way; reset or load the optimizer's parameters before training on."""


class HostMemoryShort(RoundPipeError):
    """Host memory does not suffice; nothing was allocated. The message has the sum by kind and what would help."""


class ImpureLayer(RoundPipeError):
    """A layer changed more than its output and buffers, or gave another output from the same inputs and seeds."""


class TrainsNothing(RoundPipeError):
    """An optimizer stepped where that changes no weights; the message has the line to write."""


class MachineFailed(RoundPipeError):
    """A call or step failed on another machine; the message has its rank and its error in words.

    `rank`: the first machine that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[MachineFailed], tuple[int, str]]:
        return type(self), (self.rank, str(self))


class AloneOnly(RoundPipeError):
    """The operation works on one machine only; the message says why, and what to do on several."""


class TrainingWarning(UserWarning):
    """A training loop that runs, but is unlikely to do what was meant; the message has the line to write."""


class HostMemoryWarning(RuntimeWarning):
    """Host memory will not suffice, if the model is used as is likely; the message has the sum by kind."""


class DeviceMemoryWarning(RuntimeWarning):
    """A device ran out of memory; what was unfinished ran again in smaller parts. The message says where."""


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
