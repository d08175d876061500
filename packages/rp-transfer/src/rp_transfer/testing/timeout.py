"""Run a call in a new thread with a time limit, for checks of code that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rp_transfer.errors import NotConforming

Result = TypeVar("Result")


def bounded(call: Callable[[], Result], *, seconds: float = 60.0) -> Result:
    """Run `call` in a new thread, so that its thread-local settings do not stay; return or raise as it does.

    >>> bounded(lambda: 1 + 1)
    2

    Raises `NotConforming` if it takes longer than `seconds`; its thread is then left running.
    """
    future: Future[Result] = Future()
    thread = threading.Thread(target=_settle, args=(future, call), name="rp-transfer-check", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise NotConforming(f"a check must end within {seconds:g} s, but still hangs")
    return future.result()


def _settle(future: Future[Result], call: Callable[[], Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
