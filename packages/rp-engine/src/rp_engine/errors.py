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

from rp_errors import AloneOnly, Busy, RoundPipeError, TrainingWarning, add_note, class_name, in_words
from rp_recompute.errors import ImpureLayer
from rp_state.errors import GradientsIncomplete, Stale, StepFailed

__all__ = [
    "AloneOnly",
    "BoundaryError",
    "Busy",
    "DeviceMemoryWarning",
    "DifferentiatedTwice",
    "GradientsIncomplete",
    "HostMemoryShort",
    "HostMemoryWarning",
    "ImpureLayer",
    "MachineFailed",
    "RoundPipeError",
    "Stale",
    "StepFailed",
    "TrainingWarning",
    "TrainsNothing",
    "add_note",
    "class_name",
    "in_words",
]


class BoundaryError(RoundPipeError):
    """A layer writes an input that shares memory with another tensor, or returns a tensor inside of an object.

    The message names the layer and the paths. It is raised whether or not the plan has a boundary there.
    """


class DifferentiatedTwice(RoundPipeError):
    """Gradients that a model returned under ``create_graph=True`` were differentiated; they have no graph."""


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


class HostMemoryWarning(RuntimeWarning):
    """Host memory will not suffice, if the model is used as is likely; the message has the sum by kind."""


class DeviceMemoryWarning(RuntimeWarning):
    """A device ran out of memory; what was unfinished ran again in smaller parts. The message says where."""
