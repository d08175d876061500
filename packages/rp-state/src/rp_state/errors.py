"""What failures have left of a model's state, and what can no longer be done with it.

::

    rp_errors.RoundPipeError (RuntimeError)
    ├── Stale                 backward through weights that were replaced since forward
    ├── GradientsIncomplete   a call failed and left part of its gradients
    └── StepFailed            a step function failed and left part of its update
"""

from __future__ import annotations

from rp_errors import RoundPipeError


class Stale(RoundPipeError):
    """The weights that forward read have been replaced, so its backward can no longer run."""


class GradientsIncomplete(RoundPipeError):
    """A training call failed part-way; drop its gradients before training on."""


class StepFailed(RoundPipeError):
    """A step failed part-way; reset or load the optimizer's parameters before training on."""
