"""Work on threads that nobody need wait for: a request without an answer must not keep a process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def begin(work: Callable[[], Result]) -> Future[Result]:
    """Start work on a thread that does not outlive the process.

    >>> begin(lambda: 2 + 3).result()
    5
    """
    future: Future[Result] = Future()
    threading.Thread(target=_run, args=(work, future), name="rp-serving", daemon=True).start()
    return future


def each_of(items: Sequence[Item], work: Callable[[Item], Result], at_once: int) -> list[Result]:
    """Do the same work for all items, a limited number at once; return the results in order.

    >>> each_of([1, 2, 3], lambda one: one * 10, at_once=2)
    [10, 20, 30]

    Raises the first error at once; items that were not begun by then are left out.
    """
    futures: list[Future[Result]] = [Future() for _ in items]
    waiting: SimpleQueue[tuple[Item, Future[Result]]] = SimpleQueue()
    for pair in zip(items, futures, strict=True):
        waiting.put(pair)
    for _ in range(min(at_once, len(items))):
        begin(lambda: _drain(waiting, work))
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
        return [one.result() for one in futures]
    finally:
        _empty(waiting)


def _drain(waiting: SimpleQueue[tuple[Item, Future[Result]]], work: Callable[[Item], Result]) -> None:
    while True:
        try:
            item, future = waiting.get_nowait()
        except Empty:
            return
        _run(lambda item=item: work(item), future)
        if future.exception() is not None:
            _empty(waiting)


def _empty(waiting: SimpleQueue[Any]) -> None:
    while not waiting.empty():
        try:
            waiting.get_nowait()
        except Empty:
            return


def _run(work: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
