"""`MachineGroup`: the connected machines, their talks and transfers, and the thread that reduces gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from rp_dist import DistError, Machines, Work
from rp_engine.errors import in_words
from rp_optim.jobs import Outcome, Worker

from rp_machines.talk import Talk

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class MachineGroup:
    """The machines of a runtime, `size` of them; this one is number `rank`. `is_own`: they were connected here.

    `calls`, `steps`, `blocks`: the talks of the launcher, of the optimizer's thread, and of the thread that
    reduces gradients.
    """

    def __init__(self, machines: Machines, *, is_own: bool) -> None:
        self.machines = machines
        self.rank: int = machines.rank
        self.size: int = machines.size
        self._is_own = is_own
        if self.size > 1:
            _LOG.info(
                "machine %d of %d: each sends %.3g GB/s and receives as much, over %d connections to each other",
                *(self.rank, self.size, machines.network_gb_s, machines.connections),
            )
        self.calls = Talk(machines, 0)
        self.steps = Talk(machines, 1)
        self.blocks = Talk(machines, 2)
        self._failure: BaseException | None = None
        self._worker = Worker("roundpipe-machines", _nothing)
        # The numbers of transfers, which are the same on all machines.
        self._num_reduced = 0
        self._num_talks = 3
        self._num_gathered = 0
        self._num_passed = 0
        self._num_models = 0

    def new_model(self) -> int:
        """The number of a model that is wrapped now; all machines wrap models in the same order."""
        self._num_models += 1
        return self._num_models

    def new_talk(self) -> Talk:
        """A talk of its own for work that goes on beside calls; all machines begin such work in the same order."""
        self._num_talks += 1
        return Talk(self.machines, self._num_talks)

    def submit(self, job: Callable[[], _Result]) -> Outcome[_Result]:
        """Queue a job for the thread that reduces gradients."""
        return self._worker.submit(job)

    def reduce(self, block: torch.Tensor, owner: int, out: torch.Tensor | None) -> Work:
        """Begin to sum a block (numel,) over the machines, into the owner's `out`; on the reducing thread."""
        self._num_reduced += 1
        return self.machines.reduce(block, owner, tag=self._num_reduced, out=out)

    def count_gathered(self, count: int) -> int:
        """The number of the first of so many transfers, which all machines gather; on the optimizer's thread."""
        self._num_gathered += count
        return self._num_gathered - count

    def gather(self, block: torch.Tensor, owner: int, number: int) -> Work:
        """Begin to copy the owner's block (numel,) into everybody's; `number`: see `count_gathered`."""
        return self.machines.gather(block, owner, tag=number)

    def pass_around(self, memory: Sequence[torch.Tensor]) -> list[Work]:
        """Begin to copy each machine's bytes (nbytes,), by rank, to all others; on the launcher's thread."""
        self._num_passed += 1
        others = [rank for rank in range(self.size) if rank != self.rank]
        pairs = [pair for rank in others for pair in ((self.rank, rank), (rank, self.rank))]
        return [
            self.machines.pass_on(memory[source], source, target, tag=self._num_passed) for source, target in pairs
        ]

    def share(self, count: int) -> range:
        """This machine's microbatches of so many.

        Raises `ValueError` if there are fewer microbatches than machines.
        """
        if count < self.size:
            raise ValueError(
                f"the batch is split into {count} microbatches, which {self.size} machines cannot divide; take "
                f"num_microbatch={self.size} or more, and batches of that many samples at least"
            )
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def break_off(self, error: BaseException) -> None:
        """Give this machine up after an error between what all machines do: the others would wait for it."""
        if not isinstance(error, DistError):
            self.machines.fail(in_words(error))

    def fail(self, error: BaseException) -> None:
        """Tell the other machines that this one ends with an error, so that none waits for it."""
        self._failure = error
        self.machines.fail(in_words(error))

    def close(self) -> None:
        """End the thread, and leave the group if it was opened here, once all others do so, too."""
        self._worker.close()
        if not self._is_own:
            return
        try:
            if self._failure is None:
                self.machines.close()
            else:
                self.machines.__exit__(type(self._failure), self._failure, None)
        except DistError as lost:
            # The calls that it made fail have raised it.
            _LOG.info("the machines did not end together: %s", lost)


def _nothing() -> None:
    pass
