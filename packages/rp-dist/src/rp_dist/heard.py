"""What other machines have said: values by channel, entries of a store, the roster, and goodbyes."""

from __future__ import annotations

import reprlib
import time
from collections import deque
from typing import Any

from rp_dist.messages import Bye, Message, Put, Roster, Say


class Heard:
    """What was heard, in the order of each machine. Whoever waits for it holds a condition of their own.

    `kept`: what machines put into the store in which gloo's groups meet. `roster`: where all machines listen; None
    until machine 0 has told. `left`: when each machine that has said goodbye did, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.roster: dict[int, tuple[str, int]] | None = None
        self.left: dict[int, float] = {}
        self._said: dict[tuple[int, int], deque[Any]] = {}

    def said(self, rank: int, channel: int) -> deque[Any]:
        """Return the queue of values that a machine has sent on a channel. Any thread may be the first to ask.

        `setdefault` is one atomic operation. A `defaultdict` is not: while it creates a queue, another thread may
        run and create and fill one, which it then replaces.
        """
        return self._said.setdefault((rank, channel), deque())

    def note(self, rank: int, message: Message) -> None:
        """Note a message of a machine that is known. Raises `ValueError` for one of another kind."""
        match message:
            case Say(channel, value):
                self.said(rank, channel).append(value)
            case Put(key, value):
                self.kept[key] = value
            case Bye():
                self.left[rank] = time.monotonic()
            case Roster(places):
                self.roster = places
            case _:
                raise ValueError(f"not a message of a machine that is known: {reprlib.repr(message)}")
