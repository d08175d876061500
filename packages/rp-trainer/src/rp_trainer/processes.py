"""`Processes`: those that torchrun started for one training. They decide together, and the first one speaks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn, TypeVar

from rp_dist import Disagreement, DistError, InvalidTransfer, Machines
from rp_engine.errors import HostMemoryShort, MachineFailed

from rp_trainer.errors import Diverged, Lost, Refused, ToldElsewhere, Unwritable
from rp_trainer.stopping import Interrupted

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# A channel beyond the engine's.
_CHANNEL = 1 << 20
FAILED, REFUSED = 1, 2


class Processes:
    """The machines of one training; without `machines`, only this process, which then exchanges nothing.

    All machines call the same methods in the same order, and none of them during a call of a model.

    >>> ALONE.is_first, ALONE.most(15), ALONE.lead(lambda: 3)
    (True, 15, 3)
    """

    def __init__(self, machines: Machines | None = None) -> None:
        self.machines = machines
        self.rank = 0 if machines is None else machines.rank
        self.size = 1 if machines is None else machines.size
        self._agreed: BaseException | None = None

    @property
    def is_first(self) -> bool:
        """Whether this machine prints, and writes the common files."""
        return self.rank == 0

    def all(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of this machine's `work`, which calls no model; if it fails anywhere, fail everywhere.

        The first machine raises the error: its own, or another one's with its number. The others raise
        `ToldElsewhere`.
        """
        if self.machines is None:
            return work()
        try:
            done, error = work(), None
        except (Refused, Unwritable, HostMemoryShort) as refusal:
            done, error = None, refusal
        except OSError as failure:
            done, error = None, Unwritable(str(failure))
        errors = self._exchange(None if error is None else [_code(error), str(error)])
        failed = [rank for rank, each in enumerate(errors) if each is not None]
        if failed:
            code, words = errors[failed[0]]
            self._raise(code, f"machine {failed[0]}: {words}" if failed[0] else words, error)
        return done  # type: ignore[return-value] # it has not failed

    def lead(self, work: Callable[[], _Result]) -> _Result:
        """Call `work` on the first machine only; return its result, a JSON value, on all machines."""
        done = self.all(lambda: work() if self.is_first else None)
        return done if self.machines is None else self._exchange(done)[0]  # type: ignore[return-value] # as above

    def most(self, number: int) -> int:
        """Return the largest of the machines' numbers."""
        return number if self.machines is None else max(self._exchange(number))

    def same(self, facts: Mapping[str, Any]) -> None:
        """Check that these are the same on all machines. `facts`: JSON values, by option.

        Raises `Refused` on the first machine, with what differs, `ToldElsewhere` on the others.
        """
        if self.machines is None:
            return
        of_all: list[dict[str, Any]] = self._exchange(dict(facts))
        for name in facts:
            values = [each.get(name) for each in of_all]
            if any(value != values[0] for value in values):
                each = ", ".join(f"{_words(value)} on machine {rank}" for rank, value in enumerate(values))
                self._raise(
                    REFUSED, f"{name} must be the same on all machines, but is {each}; start all with one command"
                )

    def see(self, sees: Callable[[], bool], what: str) -> None:
        """Check that all machines see something that the first has created, such as its folder.

        Raises `Refused` on the first machine, `ToldElsewhere` on the others.
        """
        if self.machines is None:
            return
        blind = [str(rank) for rank, is_seen in enumerate(self._exchange(sees())) if not is_seen]
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
        """Return whether all machines end with this error, so that it need not be reported to them."""
        return error is self._agreed or isinstance(error, ToldElsewhere | Interrupted | Diverged | Unwritable)

    def _exchange(self, value: object) -> list[Any]:
        assert self.machines is not None
        return self.machines.exchange(value, channel=_CHANNEL)

    def _raise(self, code: int, words: str, own: BaseException | None = None) -> NoReturn:
        if self.is_first:
            error = own if own is not None else Refused(words) if code == REFUSED else Unwritable(words)
        else:
            error = ToldElsewhere(code)
        self._agreed = error
        raise error from None


ALONE = Processes()


@contextmanager
def joined() -> Generator[Processes]:
    """Join the processes that torchrun started. Inside the context, only the first machine prints to stdout.

    On exit, wait for the others, or report to them the error with which this machine ends.

    Raises `Lost` if a machine does not connect or is lost, `Refused` if torchrun's environment variables are
    missing or machines have other versions.
    """
    processes = Processes(_opened())
    assert processes.machines is not None
    with _quiet_unless_first(processes):
        try:
            yield processes
            processes.machines.close()
        except BaseException as error:
            _leave(processes, processes.machines, error)
            raise _to_report(processes, error) from error


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
def _quiet_unless_first(processes: Processes) -> Generator[None]:
    if processes.is_first:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _leave(processes: Processes, machines: Machines, error: BaseException) -> None:
    try:
        if processes.is_in_order(error):
            machines.close()
        else:
            machines.__exit__(type(error), error, error.__traceback__)
    except DistError as lost:
        _LOG.warning("machine %d: %s", processes.rank, lost)


def _to_report(processes: Processes, error: BaseException) -> BaseException:
    """Return the error that this process ends with. Only the first machine reports an error that all raise."""
    if isinstance(error, DistError | MachineFailed):
        return Lost(f"machine {processes.rank}: {error}")
    if processes.is_first:
        return error
    if isinstance(error, Interrupted):
        return ToldElsewhere(error.exit_code)
    if processes.is_in_order(error):
        return error if isinstance(error, ToldElsewhere) else ToldElsewhere(_code(error))
    return (
        type(error)(f"machine {processes.rank}: {error}")
        if isinstance(error, Refused | HostMemoryShort)
        else error
    )


def _code(error: BaseException) -> int:
    return REFUSED if isinstance(error, Refused | HostMemoryShort) else FAILED


def _words(value: object) -> str:
    return "not given" if value is None else str(value)
