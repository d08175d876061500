"""One machine's share of a call: some of its microbatches, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
# Of each microbatch: tensors on the host, and plain values.
Rows = Sequence[Sequence[Any]]
Facts = Callable[[], Mapping[str, Any]]


class Numbers(NamedTuple):
    """The number of this machine's first microbatch, and the seed of the call, which all machines draw.

    `is_drawn`: the seed is drawn; otherwise the run draws one as it starts, if it uses any.
    """

    first: int
    seed: int
    is_drawn: bool = True


UNDRAWN = Numbers(0, 0, is_drawn=False)


class CallBatch(Protocol):
    """The batch of a call, which every machine is given as a whole, in microbatches."""

    @property
    def num_microbatches(self) -> int: ...

    def settings(self) -> Mapping[str, Any]:
        """Return what else must be the same on all machines, JSON, by name."""
        ...

    def leaves(self) -> Iterable[Any]:
        """Return the leaves of all arguments, then those of all labels."""
        ...

    def share(self, microbatches: range) -> Self:
        """Return the batch of these microbatches alone."""
        ...


_Batch = TypeVar("_Batch", bound=CallBatch)


class CallShare(Protocol):
    """One machine's share of a call. What `facts` returns must be the same on all machines: it is compared."""

    def own(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return this machine's share of all microbatches' items."""
        ...

    def own_batch(self, batch: _Batch) -> _Batch:
        """Return this machine's microbatches."""
        ...

    def own_outputs(self, items: Sequence[_Item]) -> dict[int, _Item]:
        """Return the items of this machine's microbatches by the numbers of these."""
        ...

    def numbers(self, draws: Callable[[], bool]) -> Numbers:
        """Draw the call's seed before anything can fail; on one machine `UNDRAWN`.

        `draws`: whether the call draws a seed.
        """
        ...

    def refuse(self, words: str) -> None:
        """Raise `AloneOnly` if the call is divided between machines."""
        ...

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other machines, which wait for this one, what is raised inside."""
        ...

    def losses_of_all(self, losses: Rows, facts: Facts) -> list[Sequence[torch.Tensor]]:
        """Return the losses of all microbatches, given those of this machine's; the same bits on all machines."""
        ...

    def rows_of_all(self, rows: Rows, facts: Facts) -> Rows:
        """Return what all microbatches have, given what this machine's have."""
        ...

    # Of a forward whose backward is to come

    def begin(self) -> int:
        """All machines have told of the forward; return the number of the call, which is open now."""
        ...

    def end(self, number: int, backward: Callable[[], _Result]) -> _Result:
        """Run the backward of the forward with this number; on the launcher's thread."""
        ...

    def telling_backward(self) -> AbstractContextManager[None]:
        """As `telling`, in the backward."""
        ...

    def norm_of(self, tensors: Sequence[torch.Tensor | None]) -> float:
        """Return the norm of all of these together, roughly, if machines compare it."""
        ...

    def own_grads(self, counts: Sequence[int], grads: Sequence[_Item]) -> Sequence[_Item]:
        """Return the gradients of this machine's outputs. `counts`: how many require grad, of each microbatch."""
        ...

    def input_grads_of_all(
        self, grads: Sequence[torch.Tensor | None], norm: float, facts: Facts
    ) -> list[torch.Tensor | None]:
        """Return the gradients of all microbatches' inputs, given those of this machine's.

        `norm`: of the gradients of all outputs, which each machine has computed; they may differ in last bits.
        """
        ...
