"""Masters: parameters in the optimizer's precision whose gradients and weights lie elsewhere, in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar

import torch

from rp_optim.checks import check_beside, resolved_beside
from rp_optim.errors import InvalidLink

_Item = TypeVar("_Item")


class Ready(Protocol):
    """Whether a gradient may be read; with `wait`, block until it may, and return True."""

    def __call__(self, wait: bool, /) -> bool:
        """Never blocks unless `wait`. May be called again after it was true."""
        ...


@dataclass(slots=True)
class Link:
    """What one master is linked to, and what has become of its gradient since.

    `counts`: the gradient is in the source, times `factor`; or it is the master's own ``.grad``, None included.
    """

    gradients: Callable[[], torch.Tensor | None]
    weights: Callable[[], torch.Tensor | None]
    ready: Ready
    written: Callable[[], None]
    counts: Literal["source", "grad"] = "source"
    factor: float = 1.0
    squares: float | None = None

    def source(self, master: torch.Tensor) -> torch.Tensor | None:
        """The low-precision gradient, once it is there."""
        self.ready(True)
        gradient = self.gradients()
        if gradient is not None:
            gradient = resolved_beside("the gradient that a master is linked to", gradient, master)
        return gradient

    def destination(self, master: torch.Tensor) -> torch.Tensor | None:
        """Where the low-precision weight goes, once it may be written."""
        weight = self.weights()
        if weight is not None:
            check_beside("the weight that a master is linked to", weight, master)
        return weight


class Master(torch.nn.Parameter):
    """A parameter that can be linked; without a link it is like any other.

    While it is linked, ``.grad`` is made from the gradient it is linked to, in the master's dtype, the first time
    that something looks at it, or when a ``backward`` has added to it; that copy is the gradient from then on.

    ``torch.save`` keeps a ``torch.nn.Parameter``, which any torch loads; linked ones are refused (`InvalidLink`).

    >>> master = Master(torch.zeros(2))
    >>> link(master, gradients=lambda: torch.ones(2, dtype=torch.bfloat16))
    >>> master.grad
    tensor([1., 1.])
    """

    _link: Link | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in the master's dtype, or None."""
        if (link := source_link(self)) is not None:
            source = link.source(self)
            self.grad = None if source is None else _copy(source, self, link.factor)
        return _OWN_GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _OWN_GRAD.__set__(self, value)
        if self._link is not None:
            self._link.counts = "grad"

    @grad.deleter
    def grad(self) -> None:
        self.grad = None  # pyright: ignore[reportIncompatibleVariableOverride]  # torch has an attribute

    @property
    def data(self) -> torch.Tensor:
        """As in torch; but a linked master counts as changed: what is written there leaves no trace of its own."""
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
                "a linked master cannot be saved: its gradient is elsewhere; unlink it first (outside of a step "
                "function it is), or save master.detach()"
            )
        # Torch leaves the types out.
        return super().__reduce_ex__(protocol)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


# Torch's own attributes: descriptors written in C, of no type that could be named here.
_OWN_GRAD: Any = torch.Tensor.grad
_OWN_DATA: Any = torch.Tensor.data


def own_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """What torch itself keeps as the gradient, past any link."""
    return _OWN_GRAD.__get__(parameter)


def own_data(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's ``.data``; of a linked master without counting it as changed."""
    return _OWN_DATA.__get__(tensor)


def source_link(parameter: torch.Tensor) -> Link | None:
    """The link of a master whose gradient is in the source alone; None if it is in ``.grad``.

    Autograd adds to torch's own ``.grad``, past the property: what it has put there is joined with the source now,
    which is waited for.
    """
    link = link_of(parameter)
    if link is None or link.counts == "grad":
        return None
    added = own_grad(parameter)
    if added is None:
        return link
    source = link.source(parameter)
    if source is not None:
        added = _copy(source, parameter, link.factor).add_(added.detach())
    parameter.grad = added
    return None


def _copy(source: torch.Tensor, master: torch.Tensor, factor: float) -> torch.Tensor:
    return source.detach().to(master.dtype, copy=True).view(master.shape).mul_(factor)


class _Remains(Enum):
    UNCHANGED = "unchanged"


UNCHANGED = _Remains.UNCHANGED
"""What `unlink` returns for a gradient that nothing has touched."""


def _no_weights() -> None:
    return None


def _at_once(wait: bool, /) -> bool:
    del wait
    return True


def link(
    master: torch.Tensor,
    gradients: Callable[[], torch.Tensor | None],
    weights: Callable[[], torch.Tensor | None] = _no_weights,
    ready: Ready = _at_once,
    written: Callable[[], None] = _no_weights,
) -> None:
    """Link a master, until `unlink`, to where its gradient comes from and where its weight goes.

    All are called on the thread that steps, any number of times.

    Args:
        master: a `Master`.
        gradients: returns the gradient, contiguous, on the host, of the master's shape or flat, in any floating
            dtype; None if there is none. It is read and never written. Asked once `ready`.
        weights: returns where the updated weight goes, rounded to that tensor's dtype; None if nowhere. It may
            block until that memory may be written.
        ready: ``ready(False)`` says whether `gradients` may be asked; ``ready(True)`` blocks until it may. Masters
            whose gradients come together should share one (or equal ones): it is then asked once for all.
        written: called each time the weight is complete; not if `weights` returned None.

    A master whose weight was written keeps its version counter. One that was changed without it (no `weights`,
    or an optimizer of torch's) has a new one: so a counter that moved means a weight that is out of date.

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
        raise InvalidLink(f"only an rp_optim.Master can be linked, but this is a {type(master).__name__}; wrap it")
    if master._link is not None:  # pyright: ignore[reportPrivateUsage]
        raise InvalidLink("the master is linked already; unlink it first")
    if master.grad is not None:
        raise InvalidLink(
            "the master has a gradient of its own, which the linked one would hide; set .grad to None"
        )
    master._link = Link(gradients, weights, ready, written)  # pyright: ignore[reportPrivateUsage]


def unlink(master: torch.Tensor) -> torch.Tensor | _Remains | None:
    """End a link, and tell what its gradient is now.

    Returns `UNCHANGED` if it is still what the source holds; None if it was dropped, as by ``zero_grad``; else a
    tensor in the master's dtype: what was made of it, by looking at ``.grad`` or by scaling or clipping. The
    master's own ``.grad`` is None afterwards.

    Raises `InvalidLink` if there is no link, and what the link's callables raise; the link has ended all the same.
    """
    link = link_of(master)
    if link is None:
        raise InvalidLink("the master is not linked")
    try:
        untouched = source_link(master) is not None and link.factor == 1
        return UNCHANGED if untouched else master.grad
    finally:
        # Deleted, not None: a saved master has no traces of links.
        del master._link  # type: ignore[attr-defined]  # a master: it has a link
        master.grad = None


def link_of(parameter: torch.Tensor) -> Link | None:
    """The link of a master that has one."""
    return parameter._link if isinstance(parameter, Master) else None  # pyright: ignore[reportPrivateUsage]


def by_arrival(items: Sequence[_Item], parameter_of: Callable[[_Item], torch.Tensor]) -> Iterator[Sequence[_Item]]:
    """`items` in their order, except that those whose gradients are not there yet come when they are.

    Yields those that are there together. Equal `Ready`s are asked once for all of their items.

    Gradients arrive from the last layer to the first, so where none is there the last one is waited for.
    """
    waiting = list(items)
    while waiting:
        readies = [_ready_of(parameter_of(item)) for item in waiting]
        there = {key: ready(False) for key, ready in {_key(ready): ready for ready in readies}.items()}
        if not any(there.values()):
            readies[-1](True)
            there[_key(readies[-1])] = True
        arrived = [there[_key(ready)] for ready in readies]
        yield [item for item, here in zip(waiting, arrived, strict=True) if here]
        waiting = [item for item, here in zip(waiting, arrived, strict=True) if not here]


def _ready_of(parameter: torch.Tensor) -> Ready:
    link = link_of(parameter)
    return _at_once if link is None or link.counts == "grad" else link.ready


def _key(ready: Ready) -> object:
    # An object that defines equality alone cannot be looked up by it.
    return id(ready) if getattr(ready, "__hash__", None) is None else ready
