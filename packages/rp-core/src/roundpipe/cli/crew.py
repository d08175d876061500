"""`Crew`: the processes that torchrun started for one training; they decide alike, and the first one speaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn, TypeVar

from rp_dist import Disagreement, DistError, InvalidTransfer, Machines

from roundpipe.cli.errors import Diverged, Lost, Refused, ToldElsewhere, Unwritable
from roundpipe.cli.interrupt import Interrupted
from roundpipe.errors import HostMemoryShort, MachineFailed

_Result = TypeVar("_Result")
# Beyond those of the engine.
_CHANNEL = 1 << 20
FAILED, REFUSED = 1, 2


class Crew:
    """The machines of one training; without `machines` this process alone, and then nothing is exchanged.

    All machines call the same methods in the same order, and none of these while a call of a model is under way.

    >>> Crew().is_first, Crew().most(15), Crew().lead(lambda: 3)
    (True, 15, 3)
    """

    def __init__(self, machines: Machines | None = None) -> None:
        self.machines = machines
        self.rank = 0 if machines is None else machines.rank
        self.size = 1 if machines is None else machines.size
        self._agreed: BaseException | None = None

    @property
    def is_first(self) -> bool:
        """Whether this machine prints, and writes what all have in common."""
        return self.rank == 0

    def all(self, work: Callable[[], _Result]) -> _Result:
        """What this machine's `work` returns, which calls no model; if it fails on any machine, it does on all.

        The first machine raises the error: its own, or another one's with its number. The others raise
        `ToldElsewhere`.
        """
        if self.machines is None:
            return work()
        try:
            done, error = work(), None
        except (Refused, Unwritable, HostMemoryShort) as refusal:
            done, error = None, refusal
        told = self._exchange(None if error is None else [_code(error), str(error)])
        failed = [rank for rank, each in enumerate(told) if each is not None]
        if failed:
            code, words = told[failed[0]]
            self._raise(code, f"machine {failed[0]}: {words}" if failed[0] else words, error)
        return done  # type: ignore[return-value] # it has not failed

    def lead(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns on the first machine, which alone calls it: a value that JSON can hold."""
        found = self.all(lambda: work() if self.is_first else None)
        return found if self.machines is None else self._exchange(found)[0]  # type: ignore[return-value] # as above

    def most(self, number: int) -> int:
        """The largest of the machines' numbers."""
        return number if self.machines is None else max(self._exchange(number))

    def same(self, facts: Mapping[str, Any]) -> None:
        """Check that these are the same on all machines; `facts`: values that JSON can hold, by option.

        Raises `Refused` on the first machine, with what differs, `ToldElsewhere` on the others.
        """
        if self.machines is None:
            return
        told: list[dict[str, Any]] = self._exchange(dict(facts))
        for name in facts:
            values = [each.get(name) for each in told]
            if any(value != values[0] for value in values):
                each = ", ".join(f"{_words(value)} on machine {rank}" for rank, value in enumerate(values))
                self._raise(
                    REFUSED, f"{name} must be the same on all machines, but is {each}; start all with one command"
                )

    def see(self, sees: Callable[[], bool], what: str) -> None:
        """Check that all machines see something that the first has made, such as its folder.

        Raises `Refused` on the first machine, `ToldElsewhere` on the others.
        """
        if self.machines is None:
            return
        blind = [str(rank) for rank, found in enumerate(self._exchange(sees())) if not found]
        if blind:
            self._raise(
                REFUSED,
                f"{what} must be a folder that all machines share, but machine {', '.join(blind)} does not see "
                "what machine 0 wrote there",
            )

    def check_divides(self, flag: str, count: int | None) -> None:
        """Raise `Refused` if there are too few of something for each machine to have one."""
        if count is not None and count < self.size:
            raise Refused(f"{flag} must be at least {self.size}, the number of machines, but is {count}")

    def is_in_order(self, error: BaseException) -> bool:
        """Whether all machines end with this error, so that none need be told."""
        return error is self._agreed or isinstance(error, ToldElsewhere | Interrupted | Diverged | Unwritable)

    def _exchange(self, value: object) -> list[Any]:
        assert self.machines is not None
        return self.machines.exchange(value, channel=_CHANNEL)

    def _raise(self, code: int, words: str, own: BaseException | None = None) -> NoReturn:
        if self.is_first:
            told = own if own is not None else Refused(words) if code == REFUSED else Unwritable(words)
        else:
            told = ToldElsewhere(code)
        self._agreed = told
        raise told from None


ALONE = Crew()


@contextmanager
def joined() -> Generator[Crew]:
    """The crew that torchrun started. Inside only the first machine prints to stdout.

    Leaving it waits for the others, or tells them with what error this machine ends.

    Raises `Lost` if a machine does not come or is lost, `Refused` if torchrun's environment variables are missing
    or machines have other versions.
    """
    crew = Crew(_opened())
    assert crew.machines is not None
    with _speaking(crew):
        try:
            yield crew
            crew.machines.close()
        except BaseException as error:
            _leave(crew, crew.machines, error)
            raise _as_told(crew, error) from error


def _opened() -> Machines:
    try:
        return Machines.open()
    except InvalidTransfer as error:
        raise Refused(
            f"WORLD_SIZE says that there are several machines, but {error}; start roundpipe with torchrun, as "
            "docs/machines.md shows"
        ) from error
    except Disagreement as error:
        raise Refused(str(error)) from error
    except DistError as error:
        raise Lost(str(error)) from error


@contextmanager
def _speaking(crew: Crew) -> Generator[None]:
    if crew.is_first:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _leave(crew: Crew, machines: Machines, error: BaseException) -> None:
    try:
        if crew.is_in_order(error):
            machines.close()
        else:
            machines.__exit__(type(error), error, error.__traceback__)
    except DistError as lost:
        print(f"roundpipe: machine {crew.rank}: {lost}", file=sys.stderr)


def _as_told(crew: Crew, error: BaseException) -> BaseException:
    """The error that this process ends with: others than the first are silent about what all raise."""
    if isinstance(error, DistError | MachineFailed):
        return Lost(f"machine {crew.rank}: {error}")
    if crew.is_first:
        return error
    if isinstance(error, Interrupted):
        return ToldElsewhere(error.exit_code)
    if crew.is_in_order(error):
        return error if isinstance(error, ToldElsewhere) else ToldElsewhere(_code(error))
    return type(error)(f"machine {crew.rank}: {error}") if isinstance(error, Refused | HostMemoryShort) else error


def _code(error: BaseException) -> int:
    return REFUSED if isinstance(error, Refused | HostMemoryShort) else FAILED


def _words(value: object) -> str:
    return "not given" if value is None else str(value)
