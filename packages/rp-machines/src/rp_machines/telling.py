"""An error of one machine, told to the others, which wait for this one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial

from rp_engine.connecting import Launch, draw_seed
from rp_engine.errors import RoundPipeError

from rp_machines.talk import Talk


@contextmanager
def telling(calls: Talk, kind: str) -> Generator[None]:
    """Tell the other machines, which wait for this one to say this kind of thing, what is raised inside.

    Unless they know: what was said inside was not the same, or failed, on all of them.
    """
    try:
        yield
    except BaseException as error:
        if not calls.is_known(error):
            calls.tell(kind, error)
        raise


@contextmanager
def telling_early(calls: Talk, kind: str, launch: Launch, draws: Callable[[], bool]) -> Generator[None]:
    """As `telling`, on the caller's thread, before a call that machines share is launched.

    `draws`: whether the call draws a seed.
    """
    try:
        yield
    except BaseException as error:
        if not calls.is_known(error):
            # A thread that may not call the model says nothing in its name.
            with suppress(RoundPipeError):
                launch(partial(_tell, calls, kind, error, draws))
        raise


def _tell(calls: Talk, kind: str, error: BaseException, draws: Callable[[], bool]) -> None:
    # As the others do, whose call has begun: the generators stay the same.
    if draws():
        draw_seed()
    calls.tell(kind, error)
