"""The engine's own exceptions. What a layer or a step function raises reaches the caller unchanged.

::

    RoundPipeError (RuntimeError)
    ├── Busy                  a call while another one is being launched, or from a worker's thread
    ├── Stale                 backward through weights that were replaced since forward
    ├── GradientsIncomplete   a call failed and left part of its gradients
    ├── StepFailed            a step function failed and left part of its update
    ├── HostMemoryShort       what a model, call or step needs does not fit into host memory
    ├── TrainsNothing         an optimizer steps, but not the parameters that train
    ├── MachineFailed         a call or step failed on another machine of the group
    ├── AloneOnly             something that works on one machine alone was asked of several
    └── CheckpointError       a checkpoint cannot be written or read
        ├── CheckpointDamaged     a file of it is not what was written, or it was never finished
        └── CheckpointMismatch    it is of another model, or of other optimizers
    HostMemoryWarning (RuntimeWarning)    what a model is likely to need does not fit
    DeviceMemoryWarning (RuntimeWarning)  a device ran out of memory, and the call went on in smaller parts
    TrainingWarning (UserWarning)         a training loop that runs, but is unlikely to do what was meant
    CheckpointWarning (RuntimeWarning)    what a checkpoint does not have, or was changed to fit
    KernelWarning (RuntimeWarning)        a kernel does not run here; torch's operations do what it does, slower
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


class GradientsIncomplete(RoundPipeError):
    """A training call failed part-way; drop its gradients before training on."""


class StepFailed(RoundPipeError):
    """A step failed part-way; reset or load the optimizer's parameters before training on."""


class HostMemoryShort(RoundPipeError):
    """Host memory does not suffice; nothing was allocated. The message has the sum by kind and what would help."""


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


class CheckpointError(RoundPipeError):
    """A checkpoint cannot be written or read; training can go on, and earlier checkpoints are as they were."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint was never finished, or a file of it was cut, changed, removed or mixed up; it is not loaded."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is of another model, or of other optimizers, than those that it is to be loaded into."""


class CheckpointWarning(RuntimeWarning):
    """Something is missing from a checkpoint, or was changed to fit the model that it is loaded into."""


class HostMemoryWarning(RuntimeWarning):
    """Host memory will not suffice, if the model is used as is likely; the message has the sum by kind."""


class DeviceMemoryWarning(RuntimeWarning):
    """A device ran out of memory; what was unfinished ran again in smaller parts. The message says where."""


class KernelWarning(RuntimeWarning):
    """A kernel does not run on a device, where torch's operations do the same, slower. The message says why."""


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
