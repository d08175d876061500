"""`Talk`: what machines tell each other on one thread, so that all agree or all fail."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rp_dist import Disagreement, DistError, MachineLost, Machines
from rp_engine.errors import MachineFailed, add_note, in_words

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

    def agree(
        self, kind: str, facts: Mapping[str, Any], value: Any = None, *, where: str | None = None
    ) -> list[Any]:
        """Check that these facts are the same on all machines; return each machine's value.

        `where`: what errors call it; None: `kind`.

        Raises `rp_dist.Disagreement`, on all machines, that names what differs; otherwise as `say` does.
        """
        told = self.say(kind, [dict(facts), value])
        try:
            check_same(where or kind, [each for each, _ in told])
        except Disagreement as error:
            raise self._noted(error) from None
        return [each for _, each in told]

    def is_of_machines(self, error: BaseException) -> bool:
        """Return whether an error says that the machines do not go on together: one was lost, or they disagree."""
        return isinstance(error, DistError)


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


def _told(error: BaseException) -> str:
    """The error, and where it happened."""
    return "; ".join([in_words(error), *getattr(error, "__notes__", ())])
