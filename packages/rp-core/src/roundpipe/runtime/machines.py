"""`MachineGroup`: the machines that train together, one process each, and what they tell each other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from rp_dist import Disagreement, DistError, MachineLost, Machines, Work
from rp_optim.jobs import Outcome, Worker

from roundpipe.errors import MachineFailed, RoundPipeError, add_note, in_words

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# On an error: the number of what was said when it was told or raised.
_TOLD = "_roundpipe_told"
_Error = TypeVar("_Error", bound=BaseException)
# Of how many forwards without a backward is known that none came.
_MOST_OPEN = 1000
# What else to say of facts that differ.
_HINTS = {
    "random seed": "; what only one of them does, such as evaluating, must leave torch's generator as it was "
    "(a DataLoader draws from it): do it inside torch.random.fork_rng()",
    "batch": "; each runs its own share of one batch, so leave out DistributedSampler and the like",
}


class Talk:
    """What machines tell each other on one thread: all say the same kind of thing at the same time.

    `channel`: its number; each channel is used by one thread.

    A call in two halves, such as forward and backward, is open between them (`begin`, `ending`). If a machine does
    not end it but goes on with something else, as after an error that it has caught, the others, which do, raise
    `MachineFailed`. The machine itself says again what it said, when they have gone on: so all are in step.
    """

    def __init__(self, machines: Machines, channel: int) -> None:
        self._machines = machines
        self._channel = channel
        self._num_said = 0
        # The calls that have begun and not ended, by the number of what was said when they began.
        self._open: set[int] = set()
        self._ends: int | None = None

    def begin(self) -> int:
        """A call of which all machines have just told the first half is open now; returns its number."""
        self._open.add(self._num_said)
        if len(self._open) > _MOST_OPEN:
            self._open.remove(min(self._open))
        return self._num_said

    @contextmanager
    def ending(self, number: int) -> Generator[None]:
        """Inside, the second half of an open call is done, which may be tried once."""
        self._ends = number if number in self._open else None
        self._open.discard(number)
        try:
            yield
        finally:
            self._ends = None

    def say(self, kind: str, value: Any = None, *, error: BaseException | str | None = None) -> list[Any]:
        """Tell a value that JSON can hold, or that an error happened here; return what each machine told.

        Raises `MachineFailed` if any machine told an error, this one too, or has left the call that is ended here;
        `rp_dist.Disagreement` if they do not do the same; `rp_dist.MachineLost` if one is gone.
        """
        words = _told(error) if isinstance(error, BaseException) else error
        found = self._exchange({"kind": kind, "value": value, "error": words, "ends": self._ends})
        while (left := _left_call(found)) is not None:
            if self._ends is not None:
                raise self._noted(_left_by(found, kind))
            self._open.discard(left)
            found = self._exchange({"kind": kind, "value": value, "error": words, "ends": None})
        failed = [rank for rank, told in enumerate(found) if told["error"] is not None]
        if failed:
            raise self._noted(MachineFailed(failed[0], self._failures(failed, found)))
        if len({(told["kind"], told["ends"]) for told in found}) > 1:
            each = ", ".join(f"machine {rank}: {_doing(told)}" for rank, told in enumerate(found))
            words = (
                f"the machines do not do the same ({each}); every process must make the same calls of the model "
                "in the same order, also those that only one of them needs"
            )
            raise self._noted(Disagreement(words))
        return [told["value"] for told in found]

    def _exchange(self, told: Mapping[str, Any]) -> list[Any]:
        self._num_said += 1
        try:
            return self._machines.exchange(told, channel=self._channel)
        except MachineLost as lost:
            add_note(lost, f"RoundPipe: in {told['kind']}, in which rank {lost.rank} takes no part any more")
            raise

    def _noted(self, error: _Error) -> _Error:
        # On the error: to keep it here would keep its frames alive.
        vars(error)[_TOLD] = self._num_said
        return error

    def is_known(self, error: BaseException) -> bool:
        """Whether this error is what was said here last, or came of it, so that all machines know of it."""
        return vars(error).get(_TOLD) == self._num_said

    def _failures(self, failed: Sequence[int], found: Sequence[Mapping[str, Any]]) -> str:
        words = "; ".join(f"machine {rank} failed: {found[rank]['error']}" for rank in failed)
        return f"in {found[failed[0]]['kind']}, {words}"

    def tell(self, kind: str, error: BaseException) -> None:
        """Tell the others that an error happened here, which the caller raises."""
        # Whoever is gone cannot be told.
        with suppress(Exception):
            self.say(kind, error=error)
        self._noted(error)

    def same(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Check that these facts are the same on all machines.

        Raises `rp_dist.Disagreement`, on all machines, that names what differs; otherwise as `say` does.
        """
        told = self.say(kind, dict(facts))
        try:
            check_same(kind, told)
        except Disagreement as error:
            self._noted(error)
            raise


def _left_call(found: Sequence[Mapping[str, Any]]) -> int | None:
    """The call that some machines end now and others, which do something else, have left; None if there is none.

    >>> [_left_call([{"ends": one}, {"ends": other}]) for one, other in ((None, 3), (3, 3), (3, 4), (None, None))]
    [3, None, None, None]
    """
    ends = {told["ends"] for told in found}
    if None not in ends or len(ends) != 2:
        return None
    return next(call for call in ends if call is not None)


def _left_by(found: Sequence[Mapping[str, Any]], kind: str) -> MachineFailed:
    left = [rank for rank, told in enumerate(found) if told["ends"] is None]
    each = "; ".join(
        f"machine {rank} left this call unfinished and went on with {found[rank]['kind']}" for rank in left
    )
    return MachineFailed(
        left[0],
        f"in {kind}, {each}; if it caught an error, such as one of the loss, drop the gradients of this "
        "batch on all machines, with zero_grad()",
    )


def _doing(told: Mapping[str, Any]) -> str:
    return told["kind"] if told["ends"] is None else f"{told['kind']}, of call {told['ends']}"


def check_same(kind: str, told: Sequence[Mapping[str, Any]]) -> None:
    """Raise `rp_dist.Disagreement` if the machines told different facts.

    >>> check_same("step", [{"M": 4}, {"M": 2}])
    Traceback (most recent call last):
    rp_dist.errors.Disagreement: in step, M differs: machine 0 has 4, machine 1 has 2; ...
    """
    for name in told[0]:
        values = [facts.get(name) for facts in told]
        if any(value != values[0] for value in values):
            each = ", ".join(f"machine {rank} has {value!r}" for rank, value in enumerate(values))
            raise Disagreement(
                f"in {kind}, {name} differs: {each}; every process must be given the same model, settings, "
                f"random seed and batches{_HINTS.get(name, '')}"
            )


class MachineGroup:
    """The machines of a runtime, `size` of them; this one is number `rank`.

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
                *(self.rank, self.size, machines.link_gb_s, machines.connections),
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


def open_group(machines: Machines | bool | None) -> MachineGroup | None:
    """The group of a runtime; None if it works alone.

    Args:
        machines: an open group; True opens that of torchrun's environment; False none; None opens one if torchrun
            has started several processes.

    Raises `RoundPipeError` if True is given outside of torchrun.
    """
    if machines is None:
        machines = _is_started()
    if machines is True and not {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not _has_process_group():
        raise RoundPipeError(
            "machines=True needs torchrun, which says who takes part; start the program with torchrun, or leave "
            "machines out"
        )
    if isinstance(machines, bool):
        return MachineGroup(Machines.open(), is_own=True) if machines else None
    return MachineGroup(machines, is_own=False)


def _is_started() -> bool:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _told(error: BaseException) -> str:
    """The error, and where it happened."""
    return "; ".join([in_words(error), *getattr(error, "__notes__", ())])


def _nothing() -> None:
    pass
