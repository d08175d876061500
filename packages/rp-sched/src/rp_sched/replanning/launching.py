"""How the calls of one model are launched: as configured, or as is chosen for each kind of call."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from rp_sched.problem.modes import Mode
from rp_sched.problem.tasks import Task
from rp_sched.replanning.kept import NOT_KEPT, NotKept
from rp_sched.replanning.launch_choice import LaunchChoice, LaunchDecision, LaunchQuestion, MeasuredCalls

Launch = Literal["auto", "graphs", "eager"]
"""What tells devices to compute: graphs where they can, Python, or what is chosen."""

_NONE = frozenset[int]()


class Launching:
    """The choices of one model's kinds of calls: each a mode and a number of microbatches.

    `by_graphs`: whether graphs launch layers of the last planned call, where they can. `frees_graphs`: they have
    launched calls, but will launch none. `graphed`: the layers of which devices have graphs until then, for calls
    of any kind. `graphable`: the layers that they could launch in calls of a mode. `may_choose`: whether graphs
    could gain on these devices.
    """

    def __init__(self, graphable: Callable[[Mode], frozenset[int]], *, may_choose: bool) -> None:
        self.by_graphs = self.frees_graphs = False
        self.graphed = _NONE
        self._had_graphs = False
        # The kind of the last training call.
        self._trained: tuple[Mode, int] | None = None
        self._may_choose = may_choose
        self._graphable = graphable
        self._choices: dict[tuple[Mode, int], LaunchChoice] = {}

    def meet(
        self,
        launch: Launch,
        mode: Mode,
        microbatches: int,
        measured: MeasuredCalls,
        kept: Callable[[], NotKept] = lambda: NOT_KEPT,
        *,
        may_replay: bool = True,
    ) -> None:
        """Note that a call is to be planned: one of a new kind begins as an earlier process has settled for.

        `kept`: asks what is kept of such calls. `may_replay`: whether graphs can launch them at all.
        """
        kind = mode, microbatches
        if kind not in self._choices and launch != "eager" and may_replay and self._may_choose:
            self._choices[kind] = choice = LaunchChoice(measured, is_timed=mode != "train", kept=kept())
            self.graphed |= choice.layers

    def choose(
        self,
        launch: Launch,
        mode: Mode,
        microbatches: int,
        tasks: Sequence[Task],
        missing_bytes: Callable[[frozenset[int]], int | None],
        *,
        may_replay: bool = True,
    ) -> None:
        """Decide how a call that was met is launched; plans count with it from the next one on.

        `missing_bytes`: the device memory that graphs of some layers lack; None if that is not known.
        `may_replay`: see `meet`.
        """
        if mode != "infer":
            self._trained = mode, microbatches
        self.by_graphs = launch == "graphs"
        if launch == "eager" or not (may_replay and self._may_choose):
            self._pass_over(mode, microbatches)
            return
        choice = self._choices[mode, microbatches]
        question = LaunchQuestion(tasks, partial(self._graphable, mode), missing_bytes)
        if launch == "graphs":
            choice.follow(question)
        else:
            choice.decide(question)
            self.by_graphs = choice.by_graphs
        self._had_graphs = self._had_graphs or self.by_graphs
        self.graphed |= choice.layers
        self._note_any()

    def _pass_over(self, mode: Mode, microbatches: int) -> None:
        """A call that is configured to have no graphs: after some, those of its kind are given up."""
        choice = self._choices.get((mode, microbatches))
        if choice is not None:
            choice.pass_over()
            self._note_any()

    def _note_any(self) -> None:
        has_any = self.by_graphs or any(one.by_graphs for one in self._choices.values())
        self.frees_graphs = self._had_graphs and not has_any
        self.graphed = self.graphed if has_any else _NONE

    def layers(self, mode: Mode, microbatches: int) -> frozenset[int]:
        """Return the layers that graphs launch in calls of this kind, as plans count with them."""
        choice = self._choices.get((mode, microbatches))
        return _NONE if choice is None else choice.layers

    def layers_of_call(self, mode: Mode, microbatches: int) -> frozenset[int]:
        """Return those that graphs launch in the last planned call."""
        return self.layers(mode, microbatches) if self.by_graphs else _NONE

    def decision(self, mode: Mode, microbatches: int) -> LaunchDecision | None:
        """Return how calls of this kind are launched, and why; None where there is no choice, or not yet."""
        choice = self._choices.get((mode, microbatches))
        return None if choice is None else choice.decision

    @property
    def of_training(self) -> LaunchDecision | None:
        """How the last training call was launched, and why; None where there is no choice, or not yet."""
        return None if self._trained is None else self.decision(*self._trained)

    def note(
        self, mode: Mode, microbatches: int, call_ms: float, *, replayed: bool, is_measured: bool = False
    ) -> None:
        """Note how long a call took. `replayed`: graphs launched some of it; `is_measured`: its layers were."""
        choice = self._choices.get((mode, microbatches))
        if choice is not None:
            choice.note(call_ms, replayed=replayed, is_measured=is_measured)

    def note_awaiting(self, mode: Mode, microbatches: int) -> bool:
        """Note a call with shapes whose graphs are to come; return whether later calls are to have them."""
        choice = self._choices.get((mode, microbatches))
        return choice is not None and choice.note_awaiting()
