"""`EngineMaster`: a model's master weight, which tells who looks for its gradient where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

from rp_optim import Master
from torch.utils.weak import WeakIdKeyDictionary

from roundpipe.errors import TrainingWarning

_WORDS = (
    "a parameter's .grad was read outside of a step function, where it is None although there are gradients: "
    "clip, log and drop them in the step function, as in model.step(lambda: "
    "(clip_grad_norm_(model.optim_parameters(), 1.0), optimizer.step(), optimizer.zero_grad()))"
)
# Whether there are gradients that no step was launched for, by master: it has no attributes, which would be saved.
_PENDING: WeakIdKeyDictionary = WeakIdKeyDictionary()


class EngineMaster(Master):
    """A master whose gradients come from the engine.

    A `TrainingWarning` says, once a model, that its ``.grad`` is read where it is None, but a step would have one.
    """

    def note_missing(self) -> None:
        """See `Master.note_missing`."""
        tell = cast("Callable[[], bool] | None", _PENDING.get(self))  # pyright: ignore[reportUnknownMemberType]
        if tell is not None and tell():
            warnings.warn(_WORDS, TrainingWarning, stacklevel=3)


def watch_reads(master: EngineMaster, tell: Callable[[], bool]) -> None:
    """Ask `tell` whenever ``.grad`` of `master` is missing, whether to say so."""
    _PENDING[master] = tell
