"""An error of one machine, told to the others, which wait for this one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial

from roundpipe.device.randomness import draw_seed
from roundpipe.errors import RoundPipeError
from roundpipe.runtime.machines import MachineGroup
from roundpipe.runtime.runtime import Runtime


@contextmanager
def telling(group: MachineGroup | None, kind: str) -> Generator[None]:
    """Tell the other machines, which wait for this one to say this kind of thing, what is raised inside.

    Unless they know: what was said inside was not the same, or failed, on all of them.
    """
    try:
        yield
    except BaseException as error:
        if group is not None and not group.calls.is_known(error):
            group.calls.tell(kind, error)
        raise


@contextmanager
def telling_early(runtime: Runtime, kind: str) -> Generator[None]:
    """As `telling`, on the caller's thread, before a training call is launched."""

    def tell(group: MachineGroup, error: BaseException) -> None:
        # As the others do, whose call has begun: the generators stay the same.
        draw_seed()
        group.calls.tell(kind, error)

    try:
        yield
    except BaseException as error:
        group = runtime.group
        if group is not None and not group.calls.is_known(error):
            # A thread that may not call the model says nothing in its name.
            with suppress(RoundPipeError):
                runtime.launch(partial(tell, group, error))
        raise
