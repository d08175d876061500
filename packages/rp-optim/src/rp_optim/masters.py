"""Master weights: parameters in the optimizer's dtype, linked to low-precision gradients and weights elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

import torch

from rp_optim.checks import check_matching, resolved_matching
from rp_optim.errors import InvalidLink
from rp_optim.pair import GradientPair

# A gradient that a master is linked to: one tensor, or a pair with the gradient as its sum.
Source = torch.Tensor | GradientPair


class MasterExchange(Protocol):
    """Exchanges values between the processes that divide masters."""

    def __call__(self, purpose: str, values: Sequence[float | None], /) -> list[float | None]:
        """Merge the values that the processes have for some masters; return them for all of these masters.

        `values`: one per master; None where this process has none. All processes call it with the same number of
        values and the same purpose.
        """
        ...


class Ready(Protocol):
    """Tells whether a gradient may be read."""

    def __call__(self, wait: bool, /) -> bool:
        """Return whether the gradient may be read. With `wait`, block until it may, and return True.

        May be called again after it has returned True.
        """
        ...


@dataclass(slots=True)
class MasterLink:
    """The callables that one master is linked to, and the state of its gradient.

    `gradient_in`: "source" if the gradient is the linked tensor times `factor`; "grad" if it is the master's own
    ``.grad``, which may be None. `squares`: the sum of the linked tensor's squares, once computed. `share`:
    exchanges values with the other processes, if masters are divided between several. `turn`: the position in the
    order in which gradients arrive, if known. `stepped`: called when an optimizer has updated the master.
    `is_dropped`: whether the gradient was dropped, by setting ``.grad`` to None or in another way that
    `Master.note_linked` has noticed. `thread`: the only thread that sees the link; None if all do.
    """

    gradients: Callable[[], Source | None]
    weights: Callable[[], torch.Tensor | None]
    ready: Ready
    written: Callable[[], None]
    share: MasterExchange | None = None
    turn: int | None = None
    stepped: Callable[[], None] | None = None
    gradient_in: Literal["source", "grad"] = "source"
    factor: float = 1.0
    squares: float | None = None
    is_dropped: bool = False
    thread: int | None = None

    def source(self, master: torch.Tensor) -> Source | None:
        """Wait for the low-precision gradient, check it and return it; None if there is none."""
        self.ready(True)
        gradient = self.gradients()
        if isinstance(gradient, GradientPair):
            return GradientPair(_checked(gradient.first, master), _checked(gradient.second, master))
        return None if gradient is None else _checked(gradient, master)

    def destination(self, master: torch.Tensor) -> torch.Tensor | None:
        """Wait until the low-precision weight may be written, check it and return it; None if there is none."""
        weight = self.weights()
        if weight is not None:
            check_matching("the weight that a master is linked to", weight, master)
        return weight


def _checked(gradient: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return resolved_matching("the gradient that a master is linked to", gradient, master)


class Master(torch.nn.Parameter):
    """A parameter that can be linked to a low-precision gradient and weight; otherwise an ordinary parameter.

    While it is linked, the first read of ``.grad``, or a ``backward`` that adds to it, copies the linked gradient
    into the master's dtype; that copy is the gradient from then on.

    ``torch.save`` saves it as a ``torch.nn.Parameter``, which any torch can load. Saving a linked master raises
    `InvalidLink`.

    >>> master = Master(torch.zeros(2))
    >>> link(master, gradients=lambda: torch.ones(2, dtype=torch.bfloat16))
    >>> master.grad
    tensor([1., 1.])
    """

    _link: MasterLink | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in the master's dtype, or None."""
        if self._is_anothers():
            self.note_anothers()
            return None
        if (link := source_link(self)) is not None:
            self.note_read()
            source = link.source(self)
            _OWN_GRAD.__set__(self, None if source is None else _copy(source, self, link.factor))
            link.gradient_in = "grad"
        gradient = _OWN_GRAD.__get__(self)
        if self._link is not None:
            self.note_linked()
        elif gradient is None:
            self.note_missing()
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._is_anothers():
            if value is not None:
                raise InvalidLink(
                    "the master is linked for a step on another thread, so its .grad cannot be set here; set it "
                    "in the step function, or after the step"
                )
            return
        _OWN_GRAD.__set__(self, value)
        if self._link is not None:
            self._link.gradient_in = "grad"
            self._link.is_dropped = self._link.is_dropped or value is None

    @grad.deleter
    def grad(self) -> None:
        self.grad = None  # pyright: ignore[reportIncompatibleVariableOverride]  # torch has an attribute

    def _is_anothers(self) -> bool:
        """Whether it is linked for another thread alone: here it has no gradient."""
        return self._link is not None and link_of(self) is None

    def note_missing(self) -> None:
        """Called when ``.grad`` of an unlinked master is read and is None. Subclasses may explain why."""

    def note_anothers(self) -> None:
        """Called where ``.grad`` is read of a master that is linked for another thread alone."""

    def note_linked(self) -> None:
        """Called when ``.grad`` of a linked master is read. Subclasses may record for what purpose."""

    def note_read(self) -> None:
        """Called before a read of ``.grad`` copies the linked gradient. Subclasses may raise an error."""

    @property
    def data(self) -> torch.Tensor:
        """As in torch, but a read increments a linked master's version, since writes through ``.data`` do not."""
        if self._link is not None:
            torch.autograd.graph.increment_version(self)
        return _OWN_DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self._link is not None:
            torch.autograd.graph.increment_version(self)
        _OWN_DATA.__set__(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._link is not None:
            raise InvalidLink(
                "a linked master cannot be saved: its gradient is elsewhere; unlink it first (masters are linked "
                "only inside a step function), or save master.detach()"
            )
        # Torch's stub has no types here.
        return super().__reduce_ex__(protocol)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


# Torch's own attributes: descriptors written in C, which have no Python type.
_OWN_GRAD: Any = torch.Tensor.grad
_OWN_DATA: Any = torch.Tensor.data


# Return torch's own ``.grad``, without copying a linked gradient into it or telling that there is none. No
# function in Python: devices' threads call it for each layer and microbatch.
own_grad: Callable[[torch.Tensor], torch.Tensor | None] = _OWN_GRAD.__get__


def own_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return torch's own ``.data``, without incrementing a linked master's version."""
    return _OWN_DATA.__get__(tensor)


def source_link(parameter: torch.Tensor) -> MasterLink | None:
    """Return the link of a master whose gradient is the linked tensor; None if it is ``.grad``, or without a link.

    Autograd adds to torch's own ``.grad``, not to the property of `Master`. If it has, this waits for the linked
    gradient and makes the sum of both the ``.grad``.
    """
    link = link_of(parameter)
    if link is None or link.gradient_in == "grad":
        return None
    added = own_grad(parameter)
    if added is None:
        return link
    source = link.source(parameter)
    if source is not None:
        added = _copy(source, parameter, link.factor).add_(added.detach())
    parameter.grad = added
    return None


def _copy(source: Source, master: torch.Tensor, factor: float) -> torch.Tensor:
    pair = isinstance(source, GradientPair)
    copied = source.sum(master.dtype) if pair else source.detach().to(master.dtype, copy=True)
    return copied.view(master.shape).mul_(factor)


class _Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED = _Unchanged.UNCHANGED
"""The result of `unlink` for a gradient that is still the linked tensor, unscaled."""


def _no_weights() -> None:
    return None


def at_once(wait: bool, /) -> bool:
    """A `Ready` of gradients that may always be read."""
    del wait
    return True


def link(
    master: torch.Tensor,
    gradients: Callable[[], Source | None],
    weights: Callable[[], torch.Tensor | None] = _no_weights,
    ready: Ready = at_once,
    written: Callable[[], None] = _no_weights,
    share: MasterExchange | None = None,
    turn: int | None = None,
    stepped: Callable[[], None] | None = None,
    *,
    only_here: bool = False,
) -> None:
    """Link a master to its low-precision gradient and to the low-precision weight made from it, until `unlink`.

    The callables are called on the thread that runs the step, any number of times.

    Args:
        master: a `Master`.
        gradients: returns the gradient, contiguous, on the host, of the master's shape or flat, in any floating
            dtype; a `GradientPair` of two such tensors; None if there is none. It is read, never written.
            Called only after `ready` returned True.
        weights: returns the tensor to write the updated weight into, rounded to its dtype; None to write none. It
            may block until that tensor may be written.
        ready: ``ready(False)`` returns whether `gradients` may be called; ``ready(True)`` blocks until it may.
            Masters whose gradients arrive together should share one `ready` (or equal ones), which is then called
            once for all.
        written: called each time the weight is complete, unless `weights` returned None.
        share: exchanges values between the processes that divide the masters, so that norms and checks for
            infinities cover all of them. In this process a master of another one is on the meta device, without a
            gradient.
        turn: masters with a turn are updated in the order of their turns, those of one turn together, each after
            waiting for its gradient. For gradients whose memory is reused once they have been read.
        stepped: called each time an optimizer of this package has updated the master.
        only_here: the calling thread alone sees the link. To others the master has no gradient: what they drop
            between steps, as in a training loop, is not that of a step under way.

    A step that writes the weight keeps the master's version counter. An update without a weight (no `weights`, or
    an optimizer of torch's) increments it. So a changed counter means that the weight is out of date.

    >>> master, weight = Master(torch.zeros(2)), torch.zeros(2, dtype=torch.bfloat16)
    >>> link(master, lambda: torch.ones(2, dtype=torch.bfloat16), lambda: weight)
    >>> from rp_optim import SGD
    >>> SGD([master], lr=0.5).step()
    >>> weight
    tensor([-0.5000, -0.5000], dtype=torch.bfloat16)
    >>> unlink(master) is UNCHANGED
    True

    Raises `InvalidLink` if `master` is not a `Master`, is linked already, or has a ``.grad`` of its own.
    """
    if not isinstance(master, Master):
        raise InvalidLink(
            f"only an rp_optim.Master can be linked, but this is a {type(master).__name__}; wrap it in Master(...)"
        )
    if master._link is not None:  # pyright: ignore[reportPrivateUsage]
        raise InvalidLink("the master is linked already; unlink it first")
    if own_grad(master) is not None:
        raise InvalidLink(
            "the master has a gradient of its own, which the linked one would hide; set .grad to None first"
        )
    made = MasterLink(gradients, weights, ready, written, share, turn, stepped)
    made.thread = threading.get_ident() if only_here else None
    master._link = made  # pyright: ignore[reportPrivateUsage]


def unlink(master: torch.Tensor) -> torch.Tensor | _Unchanged | None:
    """End a link, and return the master's gradient.

    Returns `UNCHANGED` if the gradient is still the linked tensor, and None if it was dropped, as by
    ``zero_grad``. After a read of ``.grad``, scaling or clipping it returns the new gradient, in the master's
    dtype. The master's own ``.grad`` is None afterwards.

    Raises `InvalidLink` if there is no link, and what the link's callables raise. The link ends in any case.
    """
    link = link_of(master)
    if link is None:
        raise InvalidLink("the master is not linked; link it first")
    try:
        untouched = source_link(master) is not None and link.factor == 1
        return UNCHANGED if untouched else master.grad
    finally:
        # Delete it rather than set it to None: a saved master must have no extra attributes.
        del master._link  # type: ignore[attr-defined]  # a master: it has a link
        master.grad = None


def link_of(parameter: torch.Tensor) -> MasterLink | None:
    """Return the link of a parameter; None if it is no master, not linked, or linked for another thread only."""
    # Not isinstance(), which the metaclass of torch's parameters answers in Python; so its type is not known here.
    master: Any = parameter
    found: MasterLink | None = master._link if issubclass(type(master), Master) else None
    return found if found is None or found.thread in (None, threading.get_ident()) else None


def is_elsewhere(parameter: torch.Tensor) -> bool:
    """Return whether the parameter is a master that another process has."""
    return parameter.is_meta and isinstance(parameter, Master)


def known_to_all(
    parameters: Sequence[torch.Tensor], purpose: str, values: Sequence[float | None]
) -> list[float | None]:
    """Return each parameter's value: this process's or, for a divided master, that of the process that has it.

    `values`: this process's values; None where it has none. All processes call it with the same parameters and the
    same `purpose`, which also names everything else that must agree, such as a scale.
    """
    links = [link_of(parameter) for parameter in parameters]
    divided = [index for index, link in enumerate(links) if link is not None and link.share is not None]
    merged = list(values)
    share = links[divided[0]].share if divided else None  # type: ignore[union-attr]  # it has a link
    answers = share(purpose, [merged[index] for index in divided]) if share else ()
    for index, value in zip(divided, answers, strict=True):
        merged[index] = value
    return merged
