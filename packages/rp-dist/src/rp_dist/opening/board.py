"""`Board`: torch's store at MASTER_PORT, in which the first machine leaves its rendezvous and others read it.

It serves for nothing else, and the first machine's own one ends when all have come: anybody who reaches its port
can read and write it, and take its connections.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rp_dist.errors import InvalidTransfer
from rp_dist.links import interfaces
from rp_dist.opening.membership import Membership

_CARD = "rp_dist/card"
_POLL_S = 0.02
# The first answer of a store that is there; a port may be taken by a program of another kind.
_ANSWER_S = 5.0


class Board:
    """The store of torchrun's agent if there is one, otherwise rank 0's. `deadline_s`: by the monotonic clock."""

    def __init__(self, place: Membership, deadline_s: float) -> None:
        self._place = place
        self._deadline_s = deadline_s
        self._store: Store | None = None

    def close(self) -> None:
        """Leave the store; rank 0's own one ends."""
        self._store = None

    def read(self) -> str:
        """Return the rendezvous, as soon as there is one. Raises `TimeoutError` at the deadline."""
        while True:
            try:
                if self._store is None:
                    self._store = self._find()
                self._store.wait([_CARD], timedelta(seconds=self._left_s()))
                return self._store.get(_CARD).decode(errors="replace")
            except RuntimeError:  # the store of an earlier opening, which has just ended
                self._store = None
                self._check_time()
                time.sleep(_POLL_S)

    def replace(self, old: str, new: str) -> str:
        """On rank 0: replace the rendezvous `old` (empty: none) by another one; return that which is there now."""
        if self._store is None:
            self._store = self._host()
        return self._store.compare_set(_CARD, old, new).decode(errors="replace")

    def _find(self) -> Store:
        while (host := self._answering()) is None:
            self._check_time()
            time.sleep(_POLL_S)
        return self._join(host)

    def _host(self) -> Store:
        """Return the store as rank 0."""
        place = self._place
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return self._find()
        address = interfaces.local_address(place.host)
        # Not an address of this machine alone: the one that it belongs to may have started as rank 0, too.
        if address is None and (host := self._answering()) is not None:
            return self._join(host)
        try:
            listener = interfaces.listener(address, place.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return self._share(error)
        port = listener.getsockname()[1]
        return TCPStore(
            address or "127.0.0.1",
            port,
            place.size,
            True,
            timedelta(seconds=self._left_s()),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _share(self, error: OSError) -> Store:
        """Return the store of whoever has the port: a group of this process, another rank 0, another job."""
        with suppress(RuntimeError, TimeoutError):
            if (host := self._answering()) is not None:
                return self._join(host, _ANSWER_S)
        place = self._place
        raise InvalidTransfer(
            f"MASTER_PORT {place.port} of {place.host} is in use by another program ({error.strerror}); take "
            "another one (torchrun's --master-port), the same on all machines, and one of its own for each job"
        )

    def _join(self, host: str, seconds: float | None = None) -> Store:
        timeout = timedelta(seconds=self._left_s() if seconds is None else min(self._left_s() / 2, seconds))
        return TCPStore(host, self._place.port, self._place.size, False, timeout, wait_for_workers=False)

    def _answering(self) -> str | None:
        """Return the address at which the store's port answers; None if it does not.

        Asked first, since the store's own attempts print warnings.
        """
        try:
            with socket.create_connection(
                (self._place.host, self._place.port), timeout=min(1.0, self._left_s())
            ) as sock:
                return str(sock.getpeername()[0])
        except OSError:
            return None

    def _left_s(self) -> float:
        return max(0.01, self._deadline_s - time.monotonic())

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise TimeoutError(f"nobody answered at {self._place.host}:{self._place.port}")
