"""A training call that several machines share: this machine's microbatches, and the losses of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import rp_batch
import torch

from roundpipe.device.packet import Packet
from roundpipe.engine.machines.facts import checksum
from roundpipe.execution.call import Autocast
from roundpipe.execution.losses import Losses, check_counts, sum_columns
from roundpipe.runtime.machines import MachineGroup, check_same
from roundpipe.runtime.passing import rows_of_all

_Result = TypeVar("_Result")
# How far numbers may be apart, of their size, that machines compute alike.
_ROUNDED = 0.01


def training_call(name: str) -> str:
    """Return what machines say that they do in a training call of this model."""
    return f"forward_backward of model {name!r}"


def forward_call(name: str) -> str:
    """Return what machines say that they do in a forward of this model whose backward is to come."""
    return f"forward of model {name!r}"


class Numbers(NamedTuple):
    """The number of this machine's first microbatch, and the seed of the call, which all machines draw."""

    first: int
    seed: int


@dataclass(frozen=True, slots=True)
class SharedCall:
    """One training call of the machines: the microbatches of `group.share`, of `count` in all.

    `kind`: what the machines do. `batch`: what tells the batch from others.
    """

    group: MachineGroup
    kind: str
    share: range
    count: int
    batch: dict[str, Any] = field(repr=False)

    @classmethod
    def of(
        cls, group: MachineGroup, kind: str, parts: rp_batch.Parts[Any], labels: Sequence[Any] = ()
    ) -> SharedCall:
        """Share a call whose batch, which every machine is given as a whole, is in these microbatches.

        Raises `ValueError` if there are fewer microbatches than machines.
        """
        count = len(parts)
        batch = {
            "batch sizes": parts.sizes and list(parts.sizes),
            "batch": checksum([_told(leaf) for leaf in rp_batch.flatten((list(parts), list(labels)))[0]]),
            "autocast": [f"{each.device_type} {each.enabled} {each.dtype}" for each in Autocast.current()],
        }
        return cls(group, kind, group.share(count), count, batch)

    def own(self, items: Sequence[_Result]) -> list[_Result]:
        """Return this machine's share of all microbatches' items."""
        return [items[microbatch] for microbatch in self.share]

    def own_parts(self, parts: rp_batch.Parts[Any]) -> rp_batch.Parts[Any]:
        """Return this machine's microbatches."""
        return rp_batch.Parts(self.own(parts), sizes=None if parts.sizes is None else self.own(parts.sizes))

    def sum_losses(self, losses: Sequence[Packet], facts: dict[str, Any]) -> Losses:
        """Return the sum of all machines' losses, in the order of the microbatches; the same bits on all machines.

        Args:
            losses: of this machine's microbatches.
            facts: what must be the same on all machines.

        Raises `MachineFailed` if the call has failed on another machine, `rp_dist.Disagreement` and
        `rp_dist.MachineLost`; `TypeError` if microbatches have more losses than others.
        """
        values = [[leaf.item() for leaf in packet.leaves] for packet in losses]
        told = self.group.calls.say(self.kind, {"losses": values, "facts": {**facts, **self._facts()}})
        check_same(self.kind, [each["facts"] for each in told])
        rows = [row for each in told for row in each["losses"]]
        check_counts([len(row) for row in rows])
        like = losses[0]
        columns = [
            [torch.full_like(leaf, value) for value in column]
            for leaf, column in zip(like.leaves, zip(*rows, strict=True), strict=True)
        ]
        return sum_columns(columns, like.treedef)

    def outputs_of_all(self, outputs: Sequence[Packet], facts: dict[str, Any]) -> list[Packet]:
        """Return the outputs of all microbatches, given this machine's; otherwise like `sum_losses`."""
        like = outputs[0]
        facts = {**facts, **self._facts(), "tree of the outputs": str(like.treedef)}
        rows = [[*packet.leaves, *packet.grads] for packet in outputs]
        all_rows = rows_of_all(self.group, self.kind, rows, facts)
        count = len(like.leaves)
        own = dict(zip(self.share, outputs, strict=True))
        return [
            own.get(microbatch) or Packet(like.treedef, tuple(row[:count]), tuple(row[count:]))
            for microbatch, row in enumerate(all_rows)
        ]

    def own_grads(self, outputs: Sequence[Packet], grads: Sequence[_Result]) -> list[_Result]:
        """Return the gradients of this machine's outputs. `grads`: those of all outputs that require grad."""
        counts = [sum(packet.grads) for packet in outputs]
        begin = sum(counts[: self.share.start])
        return list(grads[begin : begin + sum(self.own(counts))])

    def input_grads_of_all(
        self, grads: Sequence[torch.Tensor | None], norm: float, facts: dict[str, Any]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of all microbatches' inputs, given those of this machine's.

        `norm`: of the gradients of all outputs, which each machine has computed; they may differ in last bits.
        """
        rows = rows_of_all(self.group, self.backward_kind, [[norm, *grads]], facts)
        check_near(self.backward_kind, "the norm of the gradients of the outputs", [row[0] for row in rows])
        return [grad for row in rows for grad in row[1:]]

    def end(self, number: int, backward: Callable[[], _Result]) -> _Result:
        """Run the backward of a forward with this number, see `Talk.begin`; on the launcher's thread."""
        with self.group.calls.ending(number):
            return backward()

    @property
    def backward_kind(self) -> str:
        """What the machines do when the backward of this forward comes."""
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


def norm_of(tensors: Sequence[torch.Tensor | None]) -> float:
    """Return the norm of all of these together, computed on the host, roughly."""
    squares = [float(one.detach().float().square().sum()) for one in tensors if one is not None]
    return math.sqrt(sum(squares))


def _told(leaf: Any) -> Any:
    """Return what must be the same of an argument: not the last bits of values that machines have computed."""
    is_computed = isinstance(leaf, torch.Tensor) and leaf.requires_grad
    return f"{leaf.dtype} {tuple(leaf.shape)}" if is_computed else leaf
