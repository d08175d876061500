"""Opening: connect the machines with each other, and name those that do not connect."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rp_dist.control import GRACE_S, Control
from rp_dist.errors import InvalidTransfer, MachineLost

_Result = TypeVar("_Result")
_CARD = "rp_dist/card"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """This machine's rank, the number of machines, and the address of rank 0."""

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def found(cls) -> Place:
        """Read the default process group if there is one, otherwise torchrun's environment variables."""
        host = os.environ.get("MASTER_ADDR", socket.gethostname())
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), host, 0)
        try:
            rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except (KeyError, ValueError) as error:
            raise InvalidTransfer(
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set, as torchrun does, or a default "
                f"process group must be initialized; {error} instead"
            ) from None
        return cls(rank, size, host, port)


# Rank 0's stores, kept until the process ends, since machines may open again.
_STORES: dict[Place, Store] = {}


class Opening:
    """The steps of opening. If one takes longer than `timeout_s`, the error names the machine to blame."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.store: Store | None = None

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.01, self.deadline_s - time.monotonic())

    def meet(self) -> Control:
        """Connect to all other machines; return the `Control` that watches the sockets."""
        place = self.place
        token = secrets.token_hex(16) if place.rank == 0 else ""
        control = Control(place.rank, place.size, self.timeout_s, token)
        port = control.listen()
        try:
            if place.rank == 0:
                self._host(control, port)
            else:
                self._join(control, port)
        except BaseException:
            control.end()
            raise
        return control

    def _host(self, control: Control, port: int) -> None:
        """On rank 0: publish the address and wait for the others."""
        control.start()
        self.bounded(lambda: self._publish([port, control.token]), control, 0)
        self._complete(control)
        roster = {str(rank): address for rank, address in control.addresses().items()}
        control.tell(["roster", roster])

    def _join(self, control: Control, port: int) -> None:
        """On other ranks: connect to rank 0, then to each other."""
        rank = self.place.rank
        while True:
            first_port, control.token = self.bounded(self._read_card, control, 0)
            # The store may hold the address of an earlier start. Then nobody answers, and rank 0 will soon replace
            # it.
            with suppress(OSError):
                control.connect(0, self.place.host, first_port, port, self.deadline_s)
                break
            if time.monotonic() > self.deadline_s:
                raise MachineLost(
                    0, f"nobody answered at {self.place.host}:{first_port} for {self.timeout_s:.3g} s"
                )
            self.store = None
            time.sleep(_POLL_S)
        control.start()
        # Rank 0 may have started later. When its own time is over, it names the machines that are missing.
        if not control.wait(lambda: control.roster is not None, self.left_s() + self.timeout_s):
            self._give_up(control, [0])
        assert control.roster is not None
        self.deadline_s = time.monotonic() + self.timeout_s
        for other in range(1, rank):
            host, their_port = control.roster[str(other)]
            try:
                control.connect(other, host, their_port, port, self.deadline_s)
            except OSError as error:
                control.give_up(other, f"rank {rank} cannot reach it at {host}:{their_port} ({error})")
        self._complete(control)

    def _complete(self, control: Control) -> None:
        if not control.wait(lambda: not control.missing(), self.left_s()):
            self._give_up(control, control.missing())

    def _give_up(self, control: Control, ranks: list[int]) -> None:
        others = f", nor did ranks {ranks[1:]}" if ranks[1:] else ""
        control.give_up(ranks[0], f"it did not come within {self.timeout_s:.3g} s{others}")
        control.raise_error()

    def _publish(self, card: list[Any]) -> None:
        if dist.is_initialized():
            dist.broadcast_object_list([card], src=0)
        else:
            self._open_store().set(_CARD, f"{card[0]} {card[1]}")

    def _read_card(self) -> tuple[int, str]:
        if dist.is_initialized():
            cards: list[Any] = [None]
            dist.broadcast_object_list(cards, src=0)
            return cards[0][0], cards[0][1]
        while True:
            try:
                store = self._open_store()
                store.wait([_CARD], timedelta(seconds=self.left_s()))
                port, token = store.get(_CARD).decode().split()
            except RuntimeError:  # the store of an earlier opening, which has just ended
                self.store = None
                self._check_time()
            else:
                return int(port), token

    def _open_store(self) -> Store:
        """Return the store of torchrun's agent if there is one, otherwise that of rank 0."""
        place = self.place
        if place.rank == 0 and place in _STORES:
            self.store = _STORES[place]
        if self.store is None:
            is_master = place.rank == 0 and not self._answers()
            while not is_master and not self._answers():
                time.sleep(_POLL_S)
            self.store = TCPStore(
                place.host,
                place.port,
                place.size,
                is_master,
                timedelta(seconds=self.left_s()),
                wait_for_workers=False,
            )
            if is_master:
                _STORES[place] = self.store
        return self.store

    def _answers(self) -> bool:
        # Try a connection first, since the store's own attempts print warnings.
        self._check_time()
        try:
            socket.create_connection((self.place.host, self.place.port), timeout=self.left_s()).close()
        except OSError:
            return False
        return True

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise TimeoutError(f"nobody answered at {self.place.host}:{self.place.port}")

    def bounded(self, do: Callable[[], _Result], control: Control, culprit: int) -> _Result:
        """Run `do` on a thread until the deadline, since some calls of torch have no timeout; return its result.

        The error names a machine that `control` loses meanwhile; for any other error and a timeout it names
        `culprit`.
        """
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(do())
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=run, name="rp-dist-opening", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < self.deadline_s:
            thread.join(_POLL_S)
            control.raise_error()
        if results:
            return results[0]
        # When a process ends, others' calls may fail a moment before it is known which one it was.
        control.wait(lambda: False, GRACE_S)
        control.give_up(culprit, _why(errors, self.timeout_s))
        control.raise_error()
        raise AssertionError("unreachable")

    def groups(self, control: Control, count: int) -> list[dist.ProcessGroup]:
        """Open gloo process groups over all machines, each with separate connections."""
        return self.bounded(lambda: [self._group(control) for _ in range(count)], control, control.rank)

    def _group(self, control: Control) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s)
        if not dist.is_initialized():
            assert self.store is not None
            dist.init_process_group(
                "gloo",
                store=PrefixStore(control.token, self.store),
                rank=self.place.rank,
                world_size=self.place.size,
                timeout=max(timeout, timedelta(minutes=30)),
            )
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group


def _why(errors: list[BaseException], timeout_s: float) -> str:
    if not errors:
        return f"it did not open within {timeout_s:.3g} s"
    hint = "; if gloo took the wrong network interface, name another one in GLOO_SOCKET_IFNAME"
    return f"it could not open ({str(errors[0]).splitlines()[0]}){hint}"
