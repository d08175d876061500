"""Two machines in one process, each a thread with a runtime of its own; what moves between them takes its time."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from lull import later
from roundpipe import Runtime
from rp_dist import Work

LIMIT_S = 60.0


def _nothing() -> None:
    pass


class _Held(Work):
    """A transfer that moves when somebody waits for it."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        super().__init__(_nothing)
        self._let_go = let_go

    def wait(self) -> None:
        self._let_go()
        super().wait()


class Meeting:
    """What both machines have said and posted.

    `delay`: by how many turns of `lull` a transfer is put off, by its kind and tag. `is_held`: whether it moves
    only when a machine waits for it, or `let_go` says so.
    """

    def __init__(
        self,
        delay: Callable[[str, int], float] = lambda *_: 0.0,
        is_held: Callable[[str, int], bool] = lambda *_: False,
    ) -> None:
        self.delay = delay
        self.is_held = is_held
        self.changed = threading.Condition()
        # Held, posted by both, and not moved yet.
        self.held: dict[tuple[str, int], Callable[[], None]] = {}
        self.let_gone: set[tuple[str, int]] = set()
        self.said: dict[tuple[int, int], dict[int, Any]] = {}
        self.posted: dict[tuple[str, int], dict[int, tuple[torch.Tensor, torch.Tensor, Work]]] = {}
        self.failed = ""

    def fail(self, reason: str) -> None:
        """Nobody is waited for any more."""
        with self.changed:
            self.failed = reason
            self.changed.notify_all()

    def meet(self, key: tuple[int, int], rank: int, value: Any) -> list[Any]:
        """Wait for what both say."""
        with self.changed:
            found = self.said.setdefault(key, {})
            found[rank] = json.loads(json.dumps(value))
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(found) == 2 or self.failed, LIMIT_S)
            if len(found) < 2:
                raise RuntimeError(f"machine {rank} is alone; {self.failed}")
        return [found[0], found[1]]

    def post(self, kind: str, tag: int, rank: int, owner: int, block: torch.Tensor, out: Any) -> Work:
        """Begin a transfer once both have posted it."""
        key = kind, tag
        work = _Held(partial(self.let_go, *key)) if self.is_held(*key) else Work(_nothing)
        with self.changed:
            found = self.posted.setdefault(key, {})
            # As if it left at once, and arrived late.
            found[rank] = block.clone(), block if out is None else out, work
            if len(found) == 2:
                self._begin(key, partial(self._move, kind, owner, found))
            self.changed.notify_all()
        return work

    def _begin(self, key: tuple[str, int], move: Callable[[], None]) -> None:
        if self.is_held(*key) and key not in self.let_gone:
            self.held[key] = move
        elif turns := self.delay(*key):
            later(move, turns)
        else:
            threading.Thread(target=move).start()

    def let_go(self, kind: str, tag: int) -> None:
        """A transfer that is held moves now, or as soon as both have posted it."""
        with self.changed:
            self.let_gone.add((kind, tag))
            move = self.held.pop((kind, tag), _nothing)
        move()

    def wait_for_posts(self, kind: str, tags: Iterable[int]) -> list[Work]:
        """Wait until both have posted these transfers, which may be held; return those of one machine."""
        keys = [(kind, tag) for tag in tags]
        with self.changed:
            self.changed.wait_for(
                lambda: all(len(self.posted.get(key, ())) == 2 for key in keys) or self.failed, LIMIT_S
            )
            return [self.posted[key][0][2] for key in keys]

    def _move(self, kind: str, owner: int, found: dict[int, tuple[torch.Tensor, torch.Tensor, Work]]) -> None:
        if kind == "reduce":
            found[owner][1].copy_(found[0][0] + found[1][0])
        else:
            found[1 - owner][1].copy_(found[owner][0])
        for _, _, work in found.values():
            work.finish()


class Paired:
    """One of two machines; has what the engine uses of `rp_dist.Machines`."""

    size = 2
    connections = 1
    network_gb_s = math.inf

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting
        self._counts: Counter[int] = Counter()

    def exchange(self, value: object, *, channel: int = 0) -> list[Any]:
        """See `rp_dist.Machines.exchange`."""
        self._counts[channel] += 1
        return self._meeting.meet((channel, self._counts[channel]), self.rank, value)

    def reduce(self, block: torch.Tensor, owner: int, *, tag: int, out: torch.Tensor | None = None) -> Work:
        """See `rp_dist.Machines.reduce`."""
        return self._meeting.post("reduce", tag, self.rank, owner, block, out)

    def gather(self, block: torch.Tensor, owner: int, *, tag: int) -> Work:
        """See `rp_dist.Machines.gather`."""
        return self._meeting.post("gather", tag, self.rank, owner, block, None)

    def pass_on(self, block: torch.Tensor, source: int, target: int, *, tag: int) -> Work:
        """See `rp_dist.Machines.pass_on`."""
        assert {source, target} == {0, 1}
        return self._meeting.post(f"pass from {source}", tag, self.rank, source, block, None)

    def fail(self, reason: str) -> None:
        """See `rp_dist.Machines.fail`."""
        self._meeting.fail(reason)


def on_both(
    body: Callable[[Runtime], Any],
    delay: Callable[[str, int], float] = lambda *_: 0.0,
    *,
    meeting: Meeting | None = None,
) -> list[Any]:
    """Run on both machines; what each returned."""
    meeting = meeting or Meeting(delay)

    def run(rank: int) -> Any:
        # A stand-in, not a subclass: it opens no connection.
        machines: Any = Paired(rank, meeting)
        with Runtime("cpu:1", machines=machines) as runtime:
            return body(runtime)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))
