"""Keeps Python's full collections of garbage short while a command trains."""

from __future__ import annotations

import gc

# By then layers are compiled and optimizer state exists: what lives now lives as long as the training.
_SETTLED = 3


class ShortCollections:
    """After a few steps of a training, lets collections pass by everything that is there until it ends.

    Modules, the model and compiled layers are so many objects that a full collection takes 0.3 s. It holds the GIL
    meanwhile, and is due every few dozen steps. Where the caller has frozen objects, nothing is done.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_frozen = False

    def __enter__(self) -> ShortCollections:
        return self

    def __exit__(self, *_: object) -> None:
        """Let collections see all objects again; some libraries complain at the process's end of what is left."""
        if self._is_frozen:
            gc.unfreeze()

    def note_step(self) -> None:
        """Note that a step was done."""
        self._steps += 1
        if self._steps == _SETTLED and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_frozen = True
