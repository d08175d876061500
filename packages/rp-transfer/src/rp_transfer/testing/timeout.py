"""A call in a thread of its own, bounded in time: for checks of code that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rp_transfer.errors import NotConforming

Result = TypeVar("Result")


def bounded(call: Callable[[], Result], *, seconds: float = 60.0) -> Result:
    """What `call` returns or raises, from a fresh thread, so that nothing it sets for its thread stays.

    >>> bounded(lambda: 1 + 1)
    2

    Raises `NotConforming` when it takes longer; the thread is left behind.
    """
    future: Future[Result] = Future()
    thread = threading.Thread(target=_settle, args=(future, call), name="rp-transfer-check", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise NotConforming(f"a check should end within {seconds:g} s, but still hangs")
    return future.result()


def _settle(future: Future[Result], call: Callable[[], Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
