"""Every error the engine itself raises; what a layer or a step function raises arrives as it is.

::

    RoundPipeError (RuntimeError)
    ├── Busy                  a call while another one is being launched, or from a worker's thread
    ├── Stale                 backward through weights that were replaced since forward
    ├── GradientsIncomplete   a call failed and left part of its gradients
    └── StepFailed            a step function failed and left part of its update
"""

from __future__ import annotations


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
