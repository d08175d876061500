"""The network between machines to plan for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Connections reach this part of a network's nominal rate in bits a second.
NETWORK_SHARE = 0.9
_NETWORK = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[MG][bB])(?:it)?(?:/s|ps)?")
_UNITS = {"Gb": NETWORK_SHARE / 8, "Mb": NETWORK_SHARE / 8e3, "GB": 1.0, "MB": 1e-3}


@dataclass(frozen=True, slots=True)
class Network:
    """The number of machines that train together, and the network between them.

    `gb_s`: the rate at which each sends while it receives as much, in 10^9 bytes a second. `name`: the rate as
    given; empty if it was measured.

    >>> Network.named(4, "100Gb").gb_s, Network.named(2, "11GB").gb_s
    (11.25, 11.0)
    """

    machines: int
    gb_s: float
    name: str = ""

    @classmethod
    def named(cls, machines: int, name: str) -> Network:
        """Create a network from a rate such as ``100Gb`` (nominal bits a second) or ``11GB`` (measured bytes).

        Raises `ValueError` for anything else.
        """
        match = _NETWORK.fullmatch(name.strip())
        rate = 0.0 if match is None else float(match["number"]) * _UNITS[match["unit"]]
        if not 1e-6 <= rate <= 1e6:
            raise ValueError(
                f"must be a rate such as 100Gb (bits a second) or 11GB (bytes a second), but is {name!r}"
            )
        return cls(machines, rate, name)


ONE_MACHINE = Network(1, math.inf)
