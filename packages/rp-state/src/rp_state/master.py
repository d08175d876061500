"""A model's master weights, whole or in halves, which warn when code reads a gradient that is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import local
from typing import NoReturn, Protocol, TypeGuard, cast

import torch
from rp_errors import AloneOnly, TrainingWarning, warn_user
from rp_optim import Master, SplitMaster, write_weights
from rp_optim.masters import link_of
from torch.utils.weak import WeakIdKeyDictionary

PENDING = (
    "a parameter's .grad was read outside of a step function, where it is None although there are gradients: "
    "clip, log and drop them in the step function, as in model.step(lambda: "
    "(clip_grad_norm_(model.optim_parameters(), 1.0), optimizer.step(), optimizer.zero_grad()))"
)
ANOTHERS = (
    "gradients of model {own!r} were read in a step function of model {other!r}, where they are None: an "
    "optimizer over both changes nothing of {own!r} there. Call step of both models with a function that steps "
    "and drops gradients, or give each an optimizer of its own"
)
CONSUMED = (
    "a parameter's .grad was read, but gradients are consumed as they arrive in forward_backward(optimizer=...) "
    "of a model with step_in_backward=True, so .grad is None: there are none to clip, log or drop; wrap the model "
    "without it for that"
)
_HOOK = (
    "a hook on one of optim_parameters() would never run: its gradients come from devices, not from a backward of "
    "its own. Change gradients in the step function, before the optimizer steps: model.step(lambda: "
    "(change(model.optim_parameters()), optimizer.step(), optimizer.zero_grad())). To step as gradients arrive, "
    "wrap the model with step_in_backward=True"
)
# By master, a function that returns the warning, if any, for a read of its missing gradient. It is not an
# attribute of the master, since attributes would be saved.
_ON_MISSING: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PART_ONLY = (
    "a parameter's .grad was read in a step function, outside of an optimizer's step: with several machines each "
    "has the gradients of its own share of the parameters only, so a norm of these would be wrong. "
    "roundpipe.optim.clip_grad_norm_ clips by the norm over all machines and returns it (with max_norm=math.inf "
    "it only returns it); roundpipe.GradScaler looks for infinities on all"
)
# The masters whose gradients are divided between machines.
_DIVIDED: WeakIdKeyDictionary = WeakIdKeyDictionary()


class TellsNone(Protocol):
    """Returns once what is wrong with a read of a gradient that is not there."""

    def __call__(self, *, is_under_way: bool) -> str | None:
        """Return the words, or None. `is_under_way`: a step has the gradient, on its own thread."""
        ...


class _PerThread(local):
    is_optimizer = False
    # The model whose step function runs.
    stepping = ""


_THREAD = _PerThread()


@contextmanager
def reading() -> Generator[None]:
    """Let code in this context read gradients that are divided between machines, as optimizers do."""
    before, _THREAD.is_optimizer = _THREAD.is_optimizer, True
    try:
        yield
    finally:
        _THREAD.is_optimizer = before


@contextmanager
def stepping(model: str) -> Generator[None]:
    """Run a step function of this model inside."""
    _THREAD.stepping = model
    try:
        yield
    finally:
        _THREAD.stepping = ""


def stepping_model() -> str:
    """Return the name of the model whose step function this thread runs; empty if it runs none."""
    return _THREAD.stepping


def refuse_part(_: object) -> None:
    """Refuse the state dict of an optimizer whose states are divided between machines: it would be incomplete.

    A hook of such optimizers. Raises `AloneOnly`, but not inside `reading`.
    """
    if not _THREAD.is_optimizer:
        raise AloneOnly(
            "an optimizer's state_dict() has the states of this machine's own parameters only: save by "
            "roundpipe.save_checkpoint(path, model, optimizer) on all machines, which any number of them loads"
        )


def note_optimizer(*, steps: bool) -> None:
    """Note that an optimizer begins (`steps`) or ends a step on this thread."""
    _THREAD.is_optimizer = steps


def is_in_optimizer() -> bool:
    """Return whether this thread is in an optimizer's step or in `reading`."""
    return _THREAD.is_optimizer


class _FromEngine(Master):
    """A master whose gradients come from the engine.

    Warns, once per model, if its ``.grad`` is read where it is None, but a step would have one.
    """

    def register_hook(self, hook: object) -> NoReturn:
        """Raise `ValueError`: hooks would not run, and nobody would notice."""
        del hook
        raise ValueError(_HOOK)

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Raise `ValueError`, as `register_hook` does."""
        self.register_hook(hook)

    def note_missing(self) -> None:
        """See `Master.note_missing`."""
        self._tell_none(is_under_way=False)

    def note_anothers(self) -> None:
        """See `Master.note_anothers`. What a loop drops beside a step is not the step's."""
        if not _in_zero_grad():
            self._tell_none(is_under_way=True)

    def _tell_none(self, *, is_under_way: bool) -> None:
        tell = cast("TellsNone", _ON_MISSING.get(self, _says_nothing))  # pyright: ignore[reportUnknownMemberType]
        if (words := tell(is_under_way=is_under_way)) is not None:
            warn_user(words, TrainingWarning)

    def note_read(self) -> None:
        """See `Master.note_read`. Raises `AloneOnly` where the gradients are divided between machines."""
        if self in _DIVIDED and not _THREAD.is_optimizer and not _in_zero_grad():
            raise AloneOnly(_PART_ONLY)

    def note_linked(self) -> None:
        """See `Master.note_linked`. Setting a gradient to zero drops it, even if another machine has it."""
        if self in _DIVIDED and (link := link_of(self)) is not None and _in_zero_grad():
            link.is_dropped = True


def _says_nothing(*, is_under_way: bool) -> str | None:
    return None


def _tells_nobody(reader: str) -> None:
    """Of a master that nobody watches."""


def _in_zero_grad() -> bool:
    # Torch's optimizers read a gradient before they drop it or set it to zero.
    frame = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
    return frame.f_code.co_name == "zero_grad"


def is_from_engine(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a master whose gradients come from the engine."""
    return isinstance(parameter, _FromEngine)


class EngineMaster(_FromEngine):
    """A whole master: see `_FromEngine`."""


class EngineSplitMaster(_FromEngine, SplitMaster):
    """A master in halves, the upper of which is the weight; see `rp_optim.SplitMaster`."""

    # Calls may be reading the weight.
    steps_unlinked = False

    def note_whole(self, reader: str) -> None:
        """See `SplitMaster.note_whole`."""
        tell = cast("Callable[[str], None]", _ON_WHOLE.get(self, _tells_nobody))  # pyright: ignore[reportUnknownMemberType]
        tell(reader)


# By master, a function to call when the master is made whole.
_ON_WHOLE: WeakIdKeyDictionary = WeakIdKeyDictionary()


def watch_whole(master: EngineSplitMaster, tell: Callable[[str], None]) -> None:
    """Call `tell` with the name of the reader when this master is made whole."""
    _ON_WHOLE[master] = tell


def is_split(master: torch.Tensor) -> TypeGuard[SplitMaster]:
    """Return whether a master is in halves now."""
    return isinstance(master, SplitMaster) and master.is_split


def master_bytes(master: torch.Tensor) -> int:
    """Return the bytes that a master takes in memory beside the weight; 0 if another machine has it.

    Of a remainder on disk, `Remainders` knows.
    """
    if master.is_meta:
        return 0
    return master.rest.nbytes if is_split(master) else master.nbytes


def published(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that publication writes to weights of this dtype; the master itself if it only casts."""
    if not isinstance(master, SplitMaster) or dtype != torch.bfloat16:
        return master
    if master.is_split:
        return master.upper
    weight = torch.empty(master.shape, dtype=dtype, device="cpu")
    write_weights([master], [weight])
    return weight


def unrounded(master: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a master's values in `dtype`, or the weight's if it is not what publication makes of them.

    Such a weight was written by code outside the engine, or its step is not published yet.
    """
    if (
        master is None
        or master.is_meta
        or not torch.equal(published(master, weight.dtype).to(weight.dtype), weight)
    ):
        return weight.to(dtype, copy=True)
    values = master.joined() if isinstance(master, SplitMaster) else master.detach()
    return values.to(dtype, copy=True)


def set_values(master: torch.Tensor, values: torch.Tensor) -> None:
    """Set a master, whole or in halves; a master in halves writes the weight, too."""
    if is_split(master):
        master.write(0, values.detach().to(torch.float32).reshape(-1))
    else:
        with torch.no_grad():
            master.copy_(values)


def refuse_reads(master: Master) -> None:
    """Let only optimizers' steps read the ``.grad`` of `master`: other machines have the other gradients."""
    _DIVIDED[master] = True


def watch_reads(master: Master, tell: TellsNone) -> None:
    """Warn as `tell` returns, if it does, whenever ``.grad`` of `master` is read but missing."""
    _ON_MISSING[master] = tell
