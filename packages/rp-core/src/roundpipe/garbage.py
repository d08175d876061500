"""`ShortCollections`: keeps Python's full collections of garbage short during a training."""

from __future__ import annotations

import gc

# By then layers are compiled and optimizer state exists: what lives now lives as long as the training.
_SETTLED = 3


class ShortCollections:
    """After three steps of a training, lets collections of garbage pass by all that is there, until it ends.

    Modules, the model and compiled layers are so many objects that a full collection takes 0.3 s. It holds the GIL
    meanwhile, and is due every ten to thirty steps. What was there after three steps and becomes garbage in a
    cycle is freed when the training is over. Where somebody has frozen objects (`gc.freeze`), nothing is done.

    `roundpipe train` and the trainers of `rp_trainer` do this; use it in a loop of your own:

    >>> with ShortCollections() as collections:
    ...     for batch in range(10):
    ...         # model.forward_backward(...), model.step(...)
    ...         collections.note_step()

    At the end all objects are seen again, also those that were frozen during the training.
    """

    def __init__(self) -> None:
        # None outside of a training.
        self._steps: int | None = None
        self._is_frozen = False

    def __enter__(self) -> ShortCollections:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Begin a training that is not in a ``with``."""
        self._steps = 0

    def note_step(self) -> None:
        """Note that a step was done. Outside of a training it does nothing."""
        if self._steps is None:
            return
        self._steps += 1
        if self._steps == _SETTLED and not gc.get_freeze_count():
            gc.collect()
            # First: Ctrl-C may come between the two lines.
            self._is_frozen = True
            gc.freeze()

    def end(self) -> None:
        """End a training that is not in a ``with``; do nothing outside of one."""
        self._steps = None
        # Some libraries complain at the process's end of what is frozen.
        if self._is_frozen:
            gc.unfreeze()
        self._is_frozen = False
