"""A call that several machines share: this machine's microbatches, and the losses of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from rp_engine.connecting import CallBatch, Facts, Numbers, Rows, check_counts, draw_seed
from rp_engine.errors import AloneOnly

from rp_machines.facts import checksum
from rp_machines.group import MachineGroup
from rp_machines.passing import rows_of_all
from rp_machines.talk import check_same
from rp_machines.telling import telling

_Item = TypeVar("_Item")
_Batch = TypeVar("_Batch", bound=CallBatch)
_Result = TypeVar("_Result")
# How far numbers may be apart, of their size, that machines compute alike.
_ROUNDED = 0.01


@dataclass(frozen=True, slots=True)
class SharedCall:
    """One call of the machines: the microbatches of `group.share`, of `count` in all.

    `kind`: what the machines do. `batch`: what tells the batch from others.
    """

    group: MachineGroup
    kind: str
    share: range
    count: int
    batch: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, group: MachineGroup, kind: str, batch: CallBatch) -> SharedCall:
        """Share a call whose batch every machine is given as a whole.

        Raises `ValueError` if there are fewer microbatches than machines.
        """
        count = batch.num_microbatches
        facts = {**batch.settings(), "batch": checksum(list(map(_told, batch.leaves())))}
        return cls(group, kind, group.share(count), count, facts)

    def own_batch(self, batch: _Batch) -> _Batch:
        """Return this machine's microbatches."""
        return batch.share(self.share)

    def own(self, items: Sequence[_Item]) -> list[_Item]:
        """Return this machine's share of all microbatches' items."""
        return [items[microbatch] for microbatch in self.share]

    def own_outputs(self, items: Sequence[_Item]) -> dict[int, _Item]:
        """Return the items of this machine's microbatches by the numbers of these."""
        return dict(zip(self.share, items, strict=True))

    def numbers(self, draws: Callable[[], bool]) -> Numbers:
        """Draw the call's seed before anything that may fail on one machine alone: the generators stay the same.

        `draws`: whether the call draws a seed; otherwise it is 0.
        """
        return Numbers(self.share.start, draw_seed() if draws() else 0)

    def refuse(self, words: str) -> None:
        """Raise `AloneOnly`."""
        raise AloneOnly(words)

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other machines, which wait for this one, what is raised inside."""
        return telling(self.group.calls, self.kind)

    def losses_of_all(self, losses: Rows, facts: Facts) -> list[Sequence[torch.Tensor]]:
        """Return the losses of all microbatches, in order; the same bits on all machines.

        Args:
            losses: of this machine's microbatches.
            facts: returns what must be the same on all machines.

        Raises `MachineFailed` if the call has failed on another machine, `rp_dist.Disagreement` and
        `rp_dist.MachineLost`; `TypeError` if microbatches have more losses than others.
        """
        values = [[leaf.item() for leaf in row] for row in losses]
        told = self.group.calls.agree(self.kind, {**facts(), **self._facts()}, values)
        rows = [row for each in told for row in each]
        check_counts([len(row) for row in rows])
        return [[torch.full_like(leaf, value) for leaf, value in zip(losses[0], row, strict=True)] for row in rows]

    def rows_of_all(self, rows: Rows, facts: Facts) -> Rows:
        """Return what all microbatches have, given what this machine's have; otherwise like `losses_of_all`."""
        return rows_of_all(self.group, self.kind, rows, {**facts(), **self._facts()})

    # Of a forward whose backward is to come

    def begin(self) -> int:
        """All machines have told of the forward; return the number of the call, which is open now."""
        return self.group.calls.begin()

    def end(self, number: int, backward: Callable[[], _Result]) -> _Result:
        """Run the backward of the forward with this number, see `Talk.begin`; on the launcher's thread."""
        with self.group.calls.ending(number):
            return backward()

    def telling_backward(self) -> AbstractContextManager[None]:
        """As `telling`, in the backward."""
        return telling(self.group.calls, self._backward_kind)

    def norm_of(self, tensors: Sequence[torch.Tensor | None]) -> float:
        """Return the norm of all of these together, computed on the host, roughly."""
        squares = [float(one.detach().float().square().sum()) for one in tensors if one is not None]
        return math.sqrt(sum(squares))

    def own_grads(self, counts: Sequence[int], grads: Sequence[_Item]) -> list[_Item]:
        """Return the gradients of this machine's outputs. `counts`: how many require grad, of each microbatch."""
        begin = sum(counts[: self.share.start])
        return list(grads[begin : begin + sum(self.own(counts))])

    def input_grads_of_all(
        self, grads: Sequence[torch.Tensor | None], norm: float, facts: Facts
    ) -> list[torch.Tensor | None]:
        """Return the gradients of all microbatches' inputs, given those of this machine's.

        `norm`: of the gradients of all outputs, which each machine has computed; they may differ in last bits.
        """
        rows = rows_of_all(self.group, self._backward_kind, [[norm, *grads]], facts())
        check_near(self._backward_kind, "the norm of the gradients of the outputs", [row[0] for row in rows])
        return [grad for row in rows for grad in row[1:]]

    @property
    def _backward_kind(self) -> str:
        return self.kind.replace("forward", "backward", 1)

    def _facts(self) -> dict[str, Any]:
        return {"number of microbatches": self.count, **self.batch}


def check_near(kind: str, name: str, values: Sequence[float]) -> None:
    """Raise `rp_dist.Disagreement` if machines differ in a number by more than they may round.

    >>> check_near("backward", "a norm", [1.0, 1.0001]), check_near("backward", "a norm", [math.nan, math.nan])
    (None, None)
    """
    if max(values) - min(values) > _ROUNDED * max(values):
        check_same(kind, [{name: value} for value in values])


def _told(leaf: Any) -> Any:
    """Return what must be the same of an argument: not the last bits of values that machines have computed."""
    is_computed = isinstance(leaf, torch.Tensor) and leaf.requires_grad
    return f"{leaf.dtype} {tuple(leaf.shape)}" if is_computed else leaf
