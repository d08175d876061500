"""A model's master weights, whole and in halves, which tell who looks for a gradient where there is none."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import local
from typing import Protocol, TypeGuard, cast

import torch
from rp_optim import Master, SplitMaster, write_weights
from rp_optim.masters import link_of
from torch.utils.weak import WeakIdKeyDictionary

from roundpipe.errors import AloneOnly, TrainingWarning

PENDING = (
    "a parameter's .grad was read outside of a step function, where it is None although there are gradients: "
    "clip, log and drop them in the step function, as in model.step(lambda: "
    "(clip_grad_norm_(model.optim_parameters(), 1.0), optimizer.step(), optimizer.zero_grad()))"
)
CONSUMED = (
    "a parameter's .grad was read, but gradients are consumed as they arrive in forward_backward(optimizer=...) "
    "of a model with step_in_backward=True, so .grad is None: there are none to clip, log or drop; wrap the model "
    "without it for that"
)
# What to say of gradients that no step was launched for, by master: it has no attributes, which would be saved.
_PENDING: WeakIdKeyDictionary = WeakIdKeyDictionary()
_ALONE = (
    "a parameter's .grad was read in a step function, outside of an optimizer's step: with several machines each "
    "has the gradients of its own share of the parameters only, so a norm of these would be wrong. "
    "roundpipe.optim.clip_grad_norm_ clips by the norm over all machines and returns it (with max_norm=math.inf "
    "it only returns it); roundpipe.GradScaler looks for infinities on all"
)
# The masters whose gradients are divided between machines.
_DIVIDED: WeakIdKeyDictionary = WeakIdKeyDictionary()


class TellsNone(Protocol):
    """Says once what is wrong with a read of a gradient that is not there."""

    def __call__(self, *, is_under_way: bool) -> str | None:
        """What to say, if anything. `is_under_way`: a step has the gradient, on its own thread."""
        ...


class _Here(local):
    is_optimizer = False


_HERE = _Here()


@contextmanager
def reading() -> Generator[None]:
    """Let code read single gradients that are divided between machines, as optimizers do."""
    before, _HERE.is_optimizer = _HERE.is_optimizer, True
    try:
        yield
    finally:
        _HERE.is_optimizer = before


def refuse_part(_: object) -> None:
    """A hook of optimizers whose states are divided between machines: their state dicts are a part of a whole.

    Raises `AloneOnly`, but not inside `reading`.
    """
    if not _HERE.is_optimizer:
        raise AloneOnly(
            "an optimizer's state_dict() has the states of this machine's own parameters only: save by "
            "roundpipe.save_checkpoint(path, model, optimizer) on all machines, which any number of them loads"
        )


def note_optimizer(*, steps: bool) -> None:
    """An optimizer begins or ends a step on this thread."""
    _HERE.is_optimizer = steps


def is_in_optimizer() -> bool:
    """Whether an optimizer steps on this thread, or code reads what optimizers may, see `reading`."""
    return _HERE.is_optimizer


class _FromEngine(Master):
    """A master whose gradients come from the engine.

    A `TrainingWarning` says, once a model, that its ``.grad`` is read where it is None, but a step would have one.
    """

    def note_missing(self) -> None:
        """See `Master.note_missing`."""
        self._tell_none(is_under_way=False)

    def note_anothers(self) -> None:
        """See `Master.note_anothers`. What a loop drops beside a step is not the step's."""
        if not _in_zero_grad():
            self._tell_none(is_under_way=True)

    def _tell_none(self, *, is_under_way: bool) -> None:
        tell = cast("TellsNone | None", _PENDING.get(self))  # pyright: ignore[reportUnknownMemberType]
        if tell is not None and (words := tell(is_under_way=is_under_way)) is not None:
            warnings.warn(words, TrainingWarning, stacklevel=4)

    def note_read(self) -> None:
        """See `Master.note_read`. Raises `AloneOnly` where the gradients are divided between machines."""
        if self in _DIVIDED and not _HERE.is_optimizer and not _in_zero_grad():
            raise AloneOnly(_ALONE)

    def note_linked(self) -> None:
        """See `Master.note_linked`. To set a gradient to zero drops it, also one that another machine has."""
        if self in _DIVIDED and (link := link_of(self)) is not None and _in_zero_grad():
            link.is_dropped = True


def _in_zero_grad() -> bool:
    # Torch's optimizers look whether there is a gradient before they drop it or set it to zero.
    frame = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
    return frame.f_code.co_name == "zero_grad"


def is_from_engine(parameter: torch.Tensor) -> bool:
    """Whether it is a master, whole or in halves, whose gradients come from the engine."""
    return isinstance(parameter, _FromEngine)


class EngineMaster(_FromEngine):
    """A whole master: see `_FromEngine`."""


class EngineSplitMaster(_FromEngine, SplitMaster):
    """A master in halves, the upper of which is the weight; see `rp_optim.SplitMaster`."""

    # Calls may be reading the weight.
    steps_unlinked = False

    def note_whole(self, reader: str) -> None:
        """See `SplitMaster.note_whole`."""
        tell = cast("Callable[[str], None] | None", _WHOLE.get(self))  # pyright: ignore[reportUnknownMemberType]
        if tell is not None:
            tell(reader)


# What is told when a master in halves is made whole, by master.
_WHOLE: WeakIdKeyDictionary = WeakIdKeyDictionary()


def watch_whole(master: EngineSplitMaster, tell: Callable[[str], None]) -> None:
    """Call `tell` with the name of what makes this master whole."""
    _WHOLE[master] = tell


def is_split(master: torch.Tensor) -> TypeGuard[SplitMaster]:
    """Whether a master is in halves now."""
    return isinstance(master, SplitMaster) and master.is_split


def master_bytes(master: torch.Tensor) -> int:
    """Bytes that a master takes on the host beside the weight; none if another machine has it."""
    if master.is_meta:
        return 0
    return master.halves[1].nbytes if is_split(master) else master.nbytes


def published(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What publication makes of a master in weights of this dtype; the master if that is no more than a cast."""
    if not isinstance(master, SplitMaster) or dtype != torch.bfloat16:
        return master
    if master.is_split:
        return master.halves[0]
    weight = torch.empty(master.shape, dtype=dtype, device="cpu")
    write_weights([master], [weight])
    return weight


def refuse_reads(master: Master) -> None:
    """Only optimizers' steps may read its ``.grad``: other machines have others."""
    _DIVIDED[master] = True


def watch_reads(master: Master, tell: TellsNone) -> None:
    """Ask `tell` whenever ``.grad`` of `master` is missing, what to say."""
    _PENDING[master] = tell
