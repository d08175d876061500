"""`TransferQueue`: transfers of one kind, posted in launch order, each finished when its pieces have arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from rp_dist.blocks.wire import Posted, Wire
from rp_dist.blocks.work import Work

Post = Callable[[], Sequence[Posted]]


class TransferQueue:
    """Posts pieces on one thread and waits for them on another, so that a late machine delays no posting."""

    def __init__(self, name: str, wire: Wire) -> None:
        self._wire = wire
        self._to_post: SimpleQueue[tuple[Post, Work] | None] = SimpleQueue()
        self._posted: SimpleQueue[tuple[Sequence[Posted], Work] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"rp-dist-{name}-{part}", daemon=True)
            for part, run in (("post", self._run_posts), ("wait", self._run_waits))
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, post: Post, work: Work) -> None:
        """Queue a transfer. `post` posts its pieces."""
        self._to_post.put((post, work))

    def _run_posts(self) -> None:
        while (job := self._to_post.get()) is not None:
            post, work = job
            try:
                self._posted.put((post(), work))
            except BaseException as error:
                work.finish(error)
            del job, post, work
        self._posted.put(None)

    def _run_waits(self) -> None:
        while (job := self._posted.get()) is not None:
            work = job[1]
            try:
                for posted in job[0]:
                    self._wire.wait(posted)
                work.finish()
            except BaseException as error:
                work.finish(error)
            del job, work

    def close(self, limit_s: float | None = None) -> None:
        """Finish the queued transfers and end the threads. After `limit_s`, abandon those that have not ended."""
        self._to_post.put(None)
        for thread in self._threads:
            thread.join(limit_s)
