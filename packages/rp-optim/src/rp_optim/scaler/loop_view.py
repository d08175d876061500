"""The scaler as the training loop sees it: the result of an earlier update, and what the loop has set since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rp_optim.jobs import Outcome
from rp_optim.scaler.numbers import ScaleNumbers, Setting


class LoopView:
    """What the training loop uses while updates run on the thread that steps."""

    def __init__(self, numbers: ScaleNumbers) -> None:
        self._used = self._last = _settled(numbers)
        self._launched = 0
        self._scale_given: float | None = None
        # By name: how many updates had been launched when the loop set it, and the value.
        self._set_here: dict[Setting, tuple[int, Any]] = {}

    def scale(self) -> float:
        """What the next losses are scaled with."""
        return self._used.result().scale if self._scale_given is None else self._scale_given

    def setting(self, name: Setting) -> Any:
        """The value that the loop has set, or that of the update whose result it uses."""
        used = self._used.result()
        set_at, value = self._set_here.get(name, (-1, None))
        return value if set_at >= used.updates else getattr(used, name)

    def note_set(self, name: Setting, value: Any) -> None:
        """The loop has set a value."""
        self._set_here[name] = (self._launched, value)

    def use(self, update: Outcome[ScaleNumbers]) -> None:
        """Use the result of an update that ran at once; keep the earlier one if it was interrupted."""
        # Waiting for an outcome that Ctrl-C has kept from being settled would never end.
        self._used = update if update.done() else self._used

    def note_launched(self, update: Outcome[ScaleNumbers], given: float | None, *, is_async: bool) -> None:
        """An update was queued. `given`: the scale that the user gave. Use the update before it if `is_async`."""
        self._used, self._last = (self._last if is_async else update), update
        self._launched += 1
        self._scale_given = given

    # Saving

    def load(self, numbers: ScaleNumbers) -> None:
        """Use loaded numbers."""
        self._used = self._last = _settled(numbers)
        self._scale_given = None
        self._set_here = {}

    def exact_state(self) -> dict[str, Any]:
        """Plain numbers, for `load_exact_state`; waits for the update whose result is used."""
        return {
            "used": asdict(self._used.result()),
            "scale_given": self._scale_given,
            "set_here": {name: [at, value] for name, (at, value) in self._set_here.items()},
        }

    def load_exact_state(self, used: ScaleNumbers, latest: ScaleNumbers, state: Mapping[str, Any]) -> None:
        """Load what `exact_state` returned. `used`: its checked numbers. `latest`: those of the last update."""
        self._used, self._last = _settled(used), _settled(latest)
        self._launched = latest.updates
        self._scale_given = state["scale_given"]
        self._set_here = {name: (at, value) for name, (at, value) in state["set_here"].items()}


def _settled(numbers: ScaleNumbers) -> Outcome[ScaleNumbers]:
    settled = Outcome(lambda: numbers)
    settled.carry_out()
    return settled
