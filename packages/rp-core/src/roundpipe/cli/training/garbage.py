"""Keeps Python's full collections of garbage short while a command trains."""

from __future__ import annotations

import gc

# By then layers are compiled and optimizer state exists: what lives from now on lives as long as the process.
_SETTLED = 3


def collect_less(steps: int) -> None:
    """After the first steps, let collections pass by everything that is there: modules, model, compiled layers.

    A full collection of all these takes 0.3 s, holds the GIL meanwhile, and is due every few dozen steps.

    Args:
        steps: those that this process has done.
    """
    if steps == _SETTLED:
        gc.collect()
        gc.freeze()
