"""`Control`: a thread that sends heartbeats, watches those of other machines, and carries small messages.

It has a separate socket to each machine, so that it can tell which one is silent whatever the transfers do.
Torch's store could not: it runs on one machine, and its calls may block forever when that machine stops.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from rp_dist.errors import Closed, Disagreement, DistError, MachineLost
from rp_dist.frames import Link

ENDED = "its process ended, or its connection was reset"
SILENT = "it lives, but took no part in an exchange for"
# When a process ends, transfers may fail a moment before its control socket tells which one it was.
GRACE_S = 0.5
LEFT = "it has closed its machines, and takes no further part"


class Control:
    """Heartbeats and small messages between `size` machines, of which this is number `rank`.

    A machine is lost if it is silent for `timeout_s` (minus two heartbeats, so that the error comes in time), or
    if its socket closes before it has said goodbye. The first machine to notice tells the others, so that all name
    the same one.

    `on_loss`: called once, on a separate thread, when a machine is lost. `waited_s`: returns how long a transfer
    from a machine has been waited for, since a machine that has said goodbye will not deliver it. `patience_s`:
    how long a machine that is alive may delay an exchange; None for no limit.
    """

    def __init__(self, rank: int, size: int, timeout_s: float, token: str = "") -> None:
        self.rank, self.size, self.timeout_s, self.token = rank, size, timeout_s, token
        self.on_loss: Callable[[], None] = _nothing
        self.waited_s: Callable[[int], float] = _not_at_all
        self.patience_s: float | None = None
        self.roster: dict[str, list[Any]] | None = None
        self._beat_s = min(1.0, timeout_s / 10)
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._heard: dict[tuple[int, int], deque[Any]] = {}
        self._addresses: dict[int, list[Any]] = {}
        # When each machine said goodbye.
        self._left: dict[int, float] = {}
        self._error: DistError | None = None
        self._has_ended = False
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._aborting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="rp-dist-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # Links

    def listen(self) -> int:
        """Accept other machines from now on, at the returned port. Must be called before `start`."""
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        else:
            listener = socket.create_server(("", 0), backlog=1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)
        return int(listener.getsockname()[1])

    def connect(self, rank: int, host: str, port: int, own_port: int, deadline_s: float) -> None:
        """Connect to another machine and introduce this one. Raises `OSError` if it does not answer."""
        sock = socket.create_connection((host, port), timeout=max(0.01, deadline_s - time.monotonic()))
        link = Link(sock, rank)
        link.send(["hello", self.token, self.rank, self.size, own_port])
        messages: list[Any] = []
        while not messages:
            if not _is_readable(sock, deadline_s - time.monotonic()):
                link.close()
                raise TimeoutError("no answer to a hello")
            messages = link.read()
        for message in messages:
            self._handle(link, message)
        self._admit(link, rank)

    def _admit(self, link: Link, rank: int) -> None:
        with self._changed:
            self._links[rank] = link
            self._changed.notify_all()
        with suppress(KeyError):
            self._selector.unregister(link.socket)
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wakes.send(b"!")

    # Methods for other threads

    def raise_error(self) -> None:
        """Raise the error that ended the machines' work, if there is one."""
        if (error := self._error) is not None:
            raise _again(error)
        if self._has_ended:
            raise Closed("the machines are closed; open them again")

    @property
    def error(self) -> DistError | None:
        """The error that ended the machines' work; None if there is none."""
        return self._error

    def wait(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `is_so()`, at most `seconds`; return whether it is. Raises at once if a machine is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_ended or is_so(), seconds)
            if not (answer := is_so()):
                self.raise_error()
            return answer

    def missing(self) -> list[int]:
        """Return the ranks that have no link yet."""
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self._links]

    def addresses(self) -> dict[int, list[Any]]:
        """Return the addresses at which the machines that have said hello listen."""
        return dict(self._addresses)

    def tell(self, message: object) -> None:
        """Send a message to all machines."""
        for link in list(self._links.values()):
            link.send(message)
        if any(link.has_unsent() for link in list(self._links.values())):
            self._wake()

    def exchange(self, value: object, channel: int = 0) -> list[Any]:
        """Send a JSON value to all machines; return one from each, in the order of ranks."""
        self.raise_error()
        self.tell(["say", channel, value])
        queues = [self._queue(rank, channel) for rank in range(self.size)]
        queues[self.rank].append(value)
        self.wait(lambda: all(queues) or any(not queues[rank] for rank in self._left), self.patience_s)
        for rank, queue in enumerate(queues):
            if not queue:
                self.give_up(rank, LEFT if rank in self._left else f"{SILENT} {self.patience_s:.3g} s")
                self.raise_error()
        return [queue.popleft() for queue in queues]

    def _queue(self, rank: int, channel: int) -> deque[Any]:
        """Return the queue of values that a machine has sent on a channel. Any thread may be the first to ask.

        `setdefault` is one atomic operation. A `defaultdict` is not: while it creates a queue, another thread may
        run and create and fill one, which it then replaces.
        """
        return self._heard.setdefault((rank, channel), deque())

    def has_left(self, rank: int) -> bool:
        """Return whether a machine has said goodbye."""
        return rank in self._left

    def give_up(self, rank: int, why: str) -> None:
        """Declare a machine lost, on this and all other machines; only the first declaration counts."""
        self._end_with(MachineLost(rank, why), tell=["lost", rank, why])

    def refuse(self, why: str) -> None:
        """End with a `Disagreement` on this machine only."""
        self._end_with(Disagreement(why), tell=None)

    def fail(self, reason: str) -> None:
        """Tell the others that this machine ends with an error."""
        self.give_up(self.rank, f"it failed: {reason}")

    def leave(self) -> None:
        """Say goodbye, wait until all others have, and end. Raises `MachineLost` for one that has not in time."""
        self.tell(["bye"])
        if not self.wait(lambda: len(self._left) == self.size - 1, self.patience_s):
            for rank in [rank for rank in self._links if rank not in self._left]:
                self.give_up(rank, f"it lives, but has not closed its machines for {self.patience_s:.3g} s")
            self.raise_error()
        self.end()

    def end(self) -> None:
        """End the thread and close the sockets, whatever the others do. May be called twice."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._wake()
        for thread in (self._thread, self._aborting):
            if thread is not None and thread.is_alive():
                thread.join()

    def _end_with(self, error: DistError, tell: object) -> None:
        with self._changed:
            if self._error is not None or self._has_ended:
                return
            self._error = error
            # Stored so that `end` joins it: a thread inside gloo when the interpreter ends would abort the
            # process.
            others_told = threading.Event()
            self._aborting = threading.Thread(
                target=self._abort, args=(others_told,), name="rp-dist-abort", daemon=True
            )
            self._aborting.start()
            self._changed.notify_all()
        try:
            if tell is not None:
                self.tell(tell)
        finally:
            others_told.set()

    def _abort(self, others_told: threading.Event) -> None:
        # Break connections only after the others have been told of the loss.
        others_told.wait()
        self.on_loss()

    # The thread

    def _run(self) -> None:
        beat_at = time.monotonic()
        while not self._has_ended:
            for link in list(self._links.values()):
                self._select_events(link)
            self._serve_all(beat_at - time.monotonic())
            now = time.monotonic()
            if now >= beat_at:
                self._beat()
                beat_at = now + self._beat_s
            self._give_up_silent()
        self._shut()

    def _serve_all(self, seconds: float) -> None:
        for key, mask in self._selector.select(max(0.0, seconds)):
            self._serve(key.data, mask)

    def _select_events(self, link: Link) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent() else 0)
        with suppress(KeyError, ValueError):
            if self._selector.get_key(link.socket).events != events:
                self._selector.modify(link.socket, events, link)

    def _beat(self) -> None:
        for link in list(self._links.values()):
            link.beat()

    def _give_up_silent(self) -> None:
        if self._silent():
            # If this thread was stalled itself, read first what has arrived meanwhile.
            self._serve_all(0)
        for rank, seconds in self._silent():
            self.give_up(rank, f"no sign of life for {seconds:.1f} s")
        now = time.monotonic()
        for rank, since in list(self._left.items()):
            # Pieces that it sent before have had that much time to arrive.
            if min(now - since, self.waited_s(rank)) > self.timeout_s:
                self.give_up(rank, LEFT)

    def _silent(self) -> list[tuple[int, float]]:
        """Return the machines that have been silent for too long, each with its seconds of silence."""
        now, limit_s = time.monotonic(), self.timeout_s - 2 * self._beat_s
        links = [(rank, now - link.heard_s) for rank, link in list(self._links.items()) if rank not in self._left]
        return [(rank, seconds) for rank, seconds in links if seconds > limit_s]

    def _serve(self, data: Link | socket.socket | None, mask: int) -> None:
        if data is None:
            self._woken.recv(4096)
        elif isinstance(data, socket.socket):
            self._accept(data)
        else:
            self._serve_link(data, mask)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            sock, _ = listener.accept()
            self._selector.register(sock, selectors.EVENT_READ, Link(sock))

    def _serve_link(self, link: Link, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if not mask & selectors.EVENT_READ:
            return
        try:
            messages = link.read()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._drop_link(link)
            return
        for message in messages:
            self._handle(link, message)

    def _drop_link(self, link: Link) -> None:
        with suppress(KeyError):
            self._selector.unregister(link.socket)
        link.close()
        if link.rank is not None and link.rank not in self._left:
            self.give_up(link.rank, ENDED)

    def _handle(self, link: Link, message: Any) -> None:
        if link.rank is None:
            self._greet(link, message)
            return
        kind, *rest = message
        with self._changed:
            if kind == "say":
                self._queue(link.rank, rest[0]).append(rest[1])
            elif kind == "bye":
                self._left[link.rank] = time.monotonic()
            elif kind == "roster":
                self.roster = rest[0]
            self._changed.notify_all()
        if kind == "lost":
            self._hear_of_loss(*rest)
        elif kind == "refused":
            self.refuse(rest[0])

    def _hear_of_loss(self, rank: int, why: str) -> None:
        self.give_up(rank, f"the other machines gave this one up: {why}" if rank == self.rank else why)

    def _greet(self, link: Link, message: Any) -> None:
        if (
            not isinstance(message, list)
            or len(cast(list[Any], message)) != 5
            or message[:2] != ["hello", self.token]
        ):
            self._drop_link(link)  # not one of our machines, or it has read the address of an earlier start
            return
        if self._left or self._error is not None:
            self._drop_link(link)  # a machine that is opening again already
            return
        rank, size, port = (int(value) for value in cast(list[Any], message)[2:])
        if size != self.size or not 0 <= rank < size or rank == self.rank or rank in self._links:
            refused = ["refused", _refusal(rank, size, self.rank, self.size)]
            link.send(refused)
            self._drop_link(link)
            self._end_with(Disagreement(refused[1]), tell=refused)
            return
        link.rank = rank
        self._addresses[rank] = [link.socket.getpeername()[0], port]
        link.send(["welcome"])
        self._admit(link, rank)

    def _shut(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Link):
                key.data.close()
            elif key.data is not None:
                key.fileobj.close()  # type: ignore[union-attr] # the listener
        self._selector.close()
        self._wakes.close()
        self._woken.close()


def _is_readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # `select.select` takes no more than 1024 files
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))


def _refusal(rank: int, size: int, own_rank: int, own_size: int) -> str:
    if size != own_size:
        return f"rank {rank} was started as one of {size} machines, but rank {own_rank} as one of {own_size}"
    return f"rank {rank} was started twice; each machine needs a different rank"


def _again(error: DistError) -> DistError:
    # If several threads raised one object, it would collect the tracebacks of all.
    return MachineLost(error.rank, error.why) if isinstance(error, MachineLost) else type(error)(*error.args)


def _not_at_all(_: int) -> float:
    """Return the waiting time of transfers before there are any."""
    return 0.0


def _nothing() -> None:
    """Do nothing on a loss before there are transfers."""
