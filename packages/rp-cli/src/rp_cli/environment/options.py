"""The options of `roundpipe env` and `roundpipe bench`."""

from __future__ import annotations

from dataclasses import dataclass

from rp_cli.options import shared
from rp_cli.options.declared import option
from rp_cli.options.kinds import DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """The options of `roundpipe env`. `devices`: None for this machine's."""

    devices: str | None = option(shared.ON_DEVICES, DEVICES, shown="all GPUs, else cpu")
    json: bool = shared.json()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `roundpipe bench`. `devices`: None for this machine's."""

    devices: str | None = option(shared.ON_DEVICES, DEVICES, shown="all GPUs, else cpu:2")
