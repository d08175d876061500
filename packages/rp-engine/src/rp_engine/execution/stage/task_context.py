"""Where the tasks of a call run on one device, with what they share there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rp_telemetry.tracing import Tracer
from rp_transfer import Backend

from rp_engine.device.replica import Twins
from rp_engine.device.transfers import Delivery
from rp_engine.execution.call import Call
from rp_engine.runtime.lane import Lane


class Outbox(Protocol):
    """Sends gradients to the host."""

    def send_to_host(self, delivery: Delivery, where: str) -> None:
        """Submit a delivery; `where` names it in words for an error's note."""
        ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What all tasks of a call on one device share."""

    call: Call
    lane: Lane
    backend: Backend
    twins: Twins
    outbox: Outbox
    tracer: Tracer

    def span(self, name: str, *parts: object) -> AbstractContextManager[None]:
        """A span of the compute stream within a task; `name` has a ``{}`` for each of `parts`."""
        device = self.lane.device
        return self.tracer.on_stream(device, device.compute, "layer", name, *parts)
