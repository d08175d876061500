"""`CallTime`: the time that a plan promises for a call beside the time that calls took, and a table of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rp_sched import LaunchDecision, Plan, Resource

from rp_telemetry.tables import table

IdleBecause = Resource | Literal["nothing fits"]


@dataclass(frozen=True, slots=True)
class CallTime:
    """The time that a plan promises and the time that its calls took, in milliseconds per call.

    >>> CallTime("model 'm', fused calls of 8 microbatches", Plan(fused=range(4)), 75.0, 100.0, 8, "device").error
    -0.25

    `what`: the model and the kind of call. `promised_ms`: simulated with what was measured of layers, links and
    host; None while calls of this kind are not measured. `measured_ms`: the median of the last `calls` calls; None
    if there were none. `bound_by`: what the simulation keeps busy for the longest time, or the
    network between machines if a step's traffic takes longer: `network_ms`, None for one machine. `idle_devices`:
    the devices that have no task in a call. `idle_because`: what bounds plans that use all devices, or that none
    fits; None if the plan leaves none idle, is a user's, or was not yet compared with others. `launch`: how calls
    are launched, and why; None while they are by Python without a choice.

    A call counts if it was launched before the previous call's gradients were on the host, with nothing in
    between. Its time runs from the end of the previous call to its own end, when its own gradients are on the
    host. If the caller waits for its step (`is_async=False`), or does other things for long, no call counts.
    """

    what: str
    plan: Plan
    promised_ms: float | None
    measured_ms: float | None
    calls: int
    bound_by: Resource | Literal["network"] | None
    network_ms: float | None = None
    idle_devices: int = 0
    idle_because: IdleBecause | None = None
    launch: LaunchDecision | None = None

    @property
    def error(self) -> float | None:
        """The promised time over the measured one, less 1; None while one of them is unknown."""
        if self.promised_ms is None or self.measured_ms is None:
            return None
        return self.promised_ms / self.measured_ms - 1

    def __str__(self) -> str:
        return as_table([self])


def as_table(times: Sequence[CallTime]) -> str:
    """Format several calls' times as one table.

    >>> print(as_table([CallTime("m", Plan(fused=range(4)), 98.0, 100.0, 8, "device")]))
    calls  |          plan |  promised |   measured | error | bound by
    m      | Plan(FB[0:4]) | 98.000 ms | 100.000 ms | -2.0% |   device
    """
    # Only calls of several machines have times of a network.
    has_network = any(one.network_ms is not None for one in times)
    has_idle = any(one.idle_devices for one in times)
    has_graphs = any(_is_by_graphs(one) for one in times)
    rows = [
        [
            one.what,
            repr(one.plan),
            _ms(one.promised_ms),
            _ms(one.measured_ms),
            _error(one.error),
            one.bound_by or "-",
            *([_ms(one.network_ms)] if has_network else []),
            *([_idle(one)] if has_idle else []),
            *(["graphs" if _is_by_graphs(one) else "eager"] if has_graphs else []),
        ]
        for one in times
    ]
    named = {"network": has_network, "idle devices": has_idle, "launch": has_graphs}
    more = [name for name, is_there in named.items() if is_there]
    return table(["calls", "plan", "promised", "measured", "error", "bound by", *more], rows)


def _is_by_graphs(time: CallTime) -> bool:
    return time.launch is not None and time.launch.by_graphs


def _idle(time: CallTime) -> str:
    because = f" ({time.idle_because})" if time.idle_because else ""
    return f"{time.idle_devices}{because}"


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f} ms"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
