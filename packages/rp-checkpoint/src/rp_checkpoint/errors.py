"""What can go wrong with a checkpoint.

::

    rp_engine.errors.RoundPipeError (RuntimeError)
    └── CheckpointError       a checkpoint cannot be written or read
        ├── CheckpointDamaged     a file of it is not what was written, or it was never finished
        └── CheckpointMismatch    it is of another model, or of other optimizers
    CheckpointWarning (RuntimeWarning)    what a checkpoint does not have, or was changed to fit
"""

from __future__ import annotations

from rp_engine.errors import RoundPipeError


class CheckpointError(RoundPipeError):
    """A checkpoint cannot be written or read; training can go on, and earlier checkpoints are as they were."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint was never finished, or a file of it was cut, changed, removed or mixed up; it is not loaded."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is of another model, or of other optimizers, than those that it is to be loaded into."""


class CheckpointWarning(RuntimeWarning):
    """Something is missing from a checkpoint, or was changed to fit the model that it is loaded into."""
