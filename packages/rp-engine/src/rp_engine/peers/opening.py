"""Who trains together: this machine alone, or those that torchrun has started or the caller has connected."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Protocol

from rp_engine.errors import RoundPipeError
from rp_engine.peers.alone import ALONE
from rp_engine.peers.peers import Peers

GROUP = "rp_engine.peers"


class Connected(Protocol):
    """Machines that are connected already: a `rp_dist.Machines`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


def opened(machines: Connected | bool | None) -> Peers:
    """Return the machines of a runtime.

    Args:
        machines: connected ones; True connects those of torchrun's environment; False none; None does so if
            torchrun has started several processes.

    >>> opened(False) is ALONE
    True

    Raises `RoundPipeError` if they need rp-machines and it is not installed, or True is given outside of torchrun.
    """
    if machines is False or (machines is None and not _is_started()):
        return ALONE
    providers = tuple(entry_points(group=GROUP))
    if not providers:
        raise RoundPipeError(
            "several machines need rp-machines, which is not installed: pip install rp-machines, or train on this "
            "one alone with machines=False"
        )
    return providers[0].load()(machines)


def _is_started() -> bool:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1
