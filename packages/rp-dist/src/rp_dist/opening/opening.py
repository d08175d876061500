"""Opening: connect the machines with each other, and name those that do not connect."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from rp_dist.admission import outside
from rp_dist.control import GRACE_S, Control
from rp_dist.errors import Disagreement, DistError, MachineLost
from rp_dist.groups import GlooGroup
from rp_dist.links import handshake, interfaces
from rp_dist.links.secret import Secret
from rp_dist.opening.board import Board
from rp_dist.opening.groups import open_group
from rp_dist.opening.membership import Membership
from rp_dist.opening.rendezvous import Rendezvous

_Result = TypeVar("_Result")
_POLL_S = 0.02
# How long to wait for an answer of a rank 0 that may have ended long ago.
_ALIVE_S = 1.0


class Opening:
    """The steps of opening. If one takes longer than `timeout_s`, the error names the machine to blame."""

    def __init__(self, place: Membership, timeout_s: float) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self._own_secret = Secret.found()
        self._num_groups = 0

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.01, self.deadline_s - time.monotonic())

    def meet(self) -> Control:
        """Connect to all other machines; return the `Control` that watches the sockets."""
        place = self.place
        run = handshake.token() if place.rank == 0 else ""
        control = Control(place.rank, place.size, self.timeout_s, run, self._own_secret)
        board = Board(place, self.deadline_s)
        try:
            if place.size == 1 and place.rank == 0:
                control.start()  # It opens no port.
            elif place.rank == 0:
                self._host(control, board)
            else:
                self._join(control, board)
        except BaseException:
            control.end()
            raise
        finally:
            board.close()
        return control

    def _host(self, control: Control, board: Board) -> None:
        """On rank 0: publish the rendezvous and wait for the others."""
        control.listen(interfaces.of_first(self.place.host))
        control.start()
        self.bounded(lambda: self._publish(control, board), control, 0)
        self._complete(control)
        control.tell(["roster", {str(rank): place for rank, place in control.places().items()}])

    def _publish(self, control: Control, board: Board) -> None:
        address, port = control.place
        secret = None if control.secret.is_own else control.secret
        rendezvous = Rendezvous(address or None, port, control.run, secret)
        if dist.is_initialized():
            dist.broadcast_object_list([rendezvous.text()], src=0)
            return
        found = board.replace("", rendezvous.text())
        while found != rendezvous.text():
            self._check_ended(found)
            found = board.replace(found, rendezvous.text())

    def _check_ended(self, text: str) -> None:
        """Raise `Disagreement` if the rank 0 that has left a rendezvous still waits for its machines."""
        try:
            rendezvous = Rendezvous.parsed(text)
            sock = self._reach(rendezvous, _ALIVE_S)
        except (ValueError, OSError):
            return  # of an earlier start
        other = Control(0, self.place.size, self.timeout_s, rendezvous.run, self._own_secret or rendezvous.secret)
        try:
            # Whoever it is learns from this hello that there are two.
            other.connect(sock, 0, time.monotonic() + self.left_s())
        except OSError:
            return
        except Disagreement as error:
            raise Disagreement(f"{error}; it was found at MASTER_PORT {self.place.port}, as rank 0") from None
        finally:
            other.dispose()

    def _join(self, control: Control, board: Board) -> None:
        """On other ranks: connect to rank 0, then to each other."""
        rank = self.place.rank
        try:
            self._connect_first(control, board)
        except (MachineLost, TimeoutError):
            if self.place.is_inside:
                raise
            raise Disagreement(outside(rank, self.place.size, "this process")) from None
        control.start()
        # Rank 0 may have started later. When its own time is over, it names the machines that are missing.
        if not control.wait(lambda: control.heard.roster is not None, self.left_s() + self.timeout_s):
            self._give_up(control, [0])
        assert control.heard.roster is not None
        self.deadline_s = time.monotonic() + self.timeout_s
        for other in range(1, rank):
            self._connect_to(other, *control.heard.roster[other], control)
        self._complete(control)

    def _connect_first(self, control: Control, board: Board) -> None:
        problem = ""
        while True:
            text = self.bounded(lambda: self._read_rendezvous(board), control, 0, problem)
            # The store may hold the rendezvous of an earlier start. Then nobody answers, and rank 0 replaces it.
            try:
                rendezvous = Rendezvous.parsed(text)
                sock = self._reach(rendezvous, self.left_s())
                self._listen(control, sock)
                control.run = rendezvous.run
                control.secret = self._own_secret or rendezvous.secret or Secret.made()
                control.connect(sock, 0, self.deadline_s)
            except (OSError, ValueError) as error:
                problem = f"; before, this went wrong: {error}"
            else:
                return
            if time.monotonic() > self.deadline_s:
                raise MachineLost(
                    0,
                    f"it did not let this machine in within {self.timeout_s:.3g} s{problem}; has it all its "
                    f"machines already, or was another job started with MASTER_PORT {self.place.port}?",
                )
            board.close()
            time.sleep(_POLL_S)

    def _reach(self, rendezvous: Rendezvous, seconds: float) -> socket.socket:
        host = rendezvous.address or self.place.host
        return socket.create_connection((host, rendezvous.port), timeout=min(seconds, handshake.CONNECT_S))

    def _listen(self, control: Control, sock: socket.socket) -> None:
        address = interfaces.chosen() or interfaces.local_end(sock)
        if self.place.rank == self.place.size - 1 or not self.place.is_inside:
            control.address = address  # Nobody connects to the last one.
        elif control.place[0] != address:
            control.listen(address)

    def _connect_to(self, other: int, host: str, port: int, control: Control) -> None:
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=min(self.left_s(), handshake.CONNECT_S))
                control.connect(sock, other, self.deadline_s)
            except OSError as error:
                problem = error
            else:
                return
            control.raise_error()
            if time.monotonic() > self.deadline_s:
                control.give_up(other, f"rank {self.place.rank} cannot reach it at {host}:{port} ({problem})")
                control.raise_error()
            time.sleep(_POLL_S)

    def _complete(self, control: Control) -> None:
        if not control.wait(lambda: not control.missing(), self.left_s()):
            self._give_up(control, control.missing())

    def _give_up(self, control: Control, ranks: list[int]) -> None:
        others = f", nor did ranks {ranks[1:]}" if ranks[1:] else ""
        hint = control.remarks()
        if self.place.rank == 0 and interfaces.local_address(self.place.host) is None:
            hint += f"; MASTER_ADDR {self.place.host} is no address of this machine alone: is it rank 0?"
        control.give_up(ranks[0], f"it did not come within {self.timeout_s:.3g} s{others}{hint}")
        control.raise_error()

    def _read_rendezvous(self, board: Board) -> str:
        if not dist.is_initialized():
            return board.read()
        texts: list[Any] = [None]
        dist.broadcast_object_list(texts, src=0)
        return str(texts[0])

    def bounded(self, do: Callable[[], _Result], control: Control, culprit: int, problem: str = "") -> _Result:
        """Run `do` on a thread until the deadline, since some calls of torch have no timeout; return its result.

        The error names a machine that `control` loses meanwhile; for any other error and a timeout it names
        `culprit`, and adds `problem`.
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
        # When a process ends, others' calls may fail a moment before it is known which one it was. And what `do`
        # finds a moment late says more than that it was late.
        control.wait(lambda: bool(results) or any(isinstance(each, DistError) for each in errors), GRACE_S)
        if results:
            return results[0]
        if errors and isinstance(errors[0], DistError):
            raise errors[0]
        control.give_up(culprit, _why(errors, self.timeout_s) + problem)
        control.raise_error()
        raise AssertionError("unreachable")

    def groups(self, control: Control, count: int) -> list[GlooGroup]:
        """Open gloo process groups over all machines, each with separate connections."""
        return self.bounded(lambda: [self._group(control) for _ in range(count)], control, control.rank)

    def _group(self, control: Control) -> GlooGroup:
        self._num_groups += 1
        return open_group(control, self._num_groups, self.timeout_s)


def _why(errors: list[BaseException], timeout_s: float) -> str:
    if not errors:
        return f"it did not open within {timeout_s:.3g} s"
    if isinstance(errors[0], TimeoutError):
        return f"it did not open within {timeout_s:.3g} s: {errors[0]}"
    hint = "; if gloo took the wrong network interface, name another one in GLOO_SOCKET_IFNAME"
    return f"it could not open ({str(errors[0]).splitlines()[0]}){hint}"
