"""How the calls of one model are launched: as configured, or as is chosen for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rp_sched import Mode, Task
from rp_telemetry.call_time import LaunchDecision
from rp_telemetry.layer_times import ModelTimer
from rp_transfer import Backend

from rp_engine.device.memory.call_size import CallSize
from rp_engine.planning.launching.choice import LaunchChoice, LaunchQuestion
from rp_engine.settings.run_config import RoundPipeRunConfig

_NONE = frozenset[int]()


class Launching:
    """The choices of one model's kinds of calls: each a mode and a number of microbatches.

    `by_graphs`: whether graphs launch layers of the last planned call, where they can. `frees_graphs`: they have
    launched calls, but will launch none. `graphable`: the layers that they could launch in calls of a mode.
    `missing_bytes`: the device memory that graphs of some layers lack, beside what these tasks take with so many
    rows; None if that is not known.
    """

    def __init__(
        self,
        backend: Backend,
        graphable: Callable[[Mode], frozenset[int]],
        missing_bytes: Callable[[int, Sequence[Task], frozenset[int]], int | None],
    ) -> None:
        self.by_graphs = self.frees_graphs = False
        self._had_graphs = False
        # The kind of the last training call.
        self._trained: tuple[Mode, int] | None = None
        self._may_choose = may_choose(backend)
        self._graphable = graphable
        self._missing_bytes = missing_bytes
        self._choices: dict[tuple[Mode, int], LaunchChoice] = {}

    def choose(
        self, config: RoundPipeRunConfig, mode: Mode, size: CallSize, tasks: Sequence[Task], timer: ModelTimer
    ) -> None:
        """Decide how a call is launched; plans count with it from the next one on."""
        if mode != "infer":
            self._trained = mode, size.microbatches
        launch = config.launch or "auto"
        self.by_graphs = launch == "graphs"
        if launch == "eager" or config.recompute_grain == "layer" or not self._may_choose:
            return
        choice = self._choices.setdefault((mode, size.microbatches), LaunchChoice(timer))
        missing = partial(self._missing_bytes, size.rows, tasks)
        question = LaunchQuestion(tasks, partial(self._graphable, mode), missing)
        if launch == "auto":
            choice.decide(question)
            self.by_graphs = choice.by_graphs
        else:
            choice.follow(question)
        timer.launch_by_graphs(choice.by_graphs)
        self._had_graphs = self._had_graphs or self.by_graphs
        has_any = self.by_graphs or any(one.by_graphs for one in self._choices.values())
        self.frees_graphs = self._had_graphs and not has_any

    def layers(self, mode: Mode, microbatches: int) -> frozenset[int]:
        """Return the layers that graphs launch in calls of this kind, as plans count with them."""
        choice = self._choices.get((mode, microbatches))
        return _NONE if choice is None else choice.layers

    def layers_of_call(self, mode: Mode, size: CallSize) -> frozenset[int]:
        """Return those that graphs launch in the last planned call."""
        return self.layers(mode, size.microbatches) if self.by_graphs else _NONE

    def decision(self, mode: Mode, microbatches: int) -> LaunchDecision | None:
        """Return how calls of this kind are launched, and why; None where there is no choice, or not yet."""
        choice = self._choices.get((mode, microbatches))
        return None if choice is None else choice.decision

    @property
    def of_training(self) -> LaunchDecision | None:
        """How the last training call was launched, and why; None where there is no choice, or not yet."""
        return None if self._trained is None else self.decision(*self._trained)

    def note(self, mode: Mode, size: CallSize, call_ms: float, *, replayed: bool) -> None:
        """Note how long a call took. `replayed`: graphs have launched some of it."""
        choice = self._choices.get((mode, size.microbatches))
        if choice is not None:
            choice.note(call_ms, replayed=replayed)


def may_choose(backend: Backend) -> bool:
    """Return whether graphs could gain on these devices.

    Not on CPU devices: launching is computing there, and what they record serves tests.
    """
    return backend.abilities.captures_graphs and not backend.abilities.computes_on_host
