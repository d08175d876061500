"""`SplitDecisions`: how calls of each kind are split, as trials have shown, and when they are tried again."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import rp_batch
from rp_engine.errors import AloneOnly, TrainingWarning
from rp_errors import warn_user

from rp_calls.dividing.trial import FoundSplit, cuts

# Kinds of calls that are tried, of each part: each trial takes two forwards. Calls of others are not split.
_MOST_KINDS = 16
# A kind is tried at its first call, and again at its 4th, 16th, 64th training call: weights that are zero at
# first, as in adapters and gates, hide how samples influence each other.
_AGAIN_AFTER = 4
# Calls after one whose samples were alike are tried, too, until samples differ: a batch of zeros, with which
# models are warmed up, says nothing. Some parts never get samples that differ, such as positions.
_MOST_UNSURE = 8

# Tries proposals, in order.
Try = Callable[[Sequence[rp_batch.Proposal]], FoundSplit | str]


@dataclass(slots=True)
class SplitDecision:
    """How calls of one kind are split.

    `way`: None if they are not, for this `reason`. `merging`: the spec that merges outputs. `granule`: see
    `FoundSplit`. `unsure`: how many trials had samples that were alike, since one had others.
    """

    way: rp_batch.Way | None
    merging: Any = None
    granule: int = 1
    reason: str = ""
    trainings: int = 0
    next_trial: int = _AGAIN_AFTER
    unsure: int = 0


class SplitDecisions:
    """How calls are split, by kind.

    >>> decisions = SplitDecisions("say how")
    >>> decisions.of("kind", "layer", (), lambda proposals: "too different", trains=True, count=2).way is None
    True

    Warnings say which submodule is not split, once for each, and with `advice` what to do if it can be.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._known: dict[Hashable, SplitDecision] = {}
        self._told: set[str] = set()

    def of(
        self,
        kind: Hashable,
        name: str,
        proposals: Sequence[rp_batch.Proposal],
        attempt: Try,
        *,
        trains: bool,
        count: int,
        is_shared: bool = False,
    ) -> SplitDecision:
        """Return how a call of this kind of the submodule `name` is split, after an attempt if one is due.

        `count`: of microbatches. `trains`: whether weights may change after the call. `is_shared`: whether
        machines divide its microbatches.

        Raises `AloneOnly` if it is not split, but shared.
        """
        decision = self._known.get(kind)
        if decision is None:
            decision = self._known[kind] = self._first(proposals, attempt)
        elif decision.way is not None:
            is_due = trains and decision.trainings + 1 == decision.next_trial
            if is_due:
                decision.next_trial *= _AGAIN_AFTER
            begins = _begins(decision, proposals, count)
            is_cut_elsewhere = any(begin % (decision.granule or math.inf) for begin in begins)
            if is_due or is_cut_elsewhere or 0 < decision.unsure < _MOST_UNSURE:
                self._again(decision, proposals, attempt, begins)
        if decision.way is None:
            self.tell_whole(name, decision.reason, is_shared=is_shared)
        decision.trainings += trains
        return decision

    def forget(self, kind: Hashable) -> None:
        """Try calls of this kind anew."""
        self._known.pop(kind, None)

    def _first(self, proposals: Sequence[rp_batch.Proposal], attempt: Try) -> SplitDecision:
        if len(self._known) >= _MOST_KINDS:
            found = f"it was tried with {_MOST_KINDS} other kinds of arguments, and is not tried with more"
        else:
            found = attempt(proposals)
        if isinstance(found, FoundSplit):
            return SplitDecision(found.proposal.way, found.merging, found.granule, unsure=int(not found.is_sure))
        return SplitDecision(None, reason=f"({found})")

    def _again(
        self, decision: SplitDecision, proposals: Sequence[rp_batch.Proposal], attempt: Try, begins: Sequence[int]
    ) -> None:
        found = attempt([each for each in proposals if each.way == decision.way])
        if isinstance(found, FoundSplit):
            decision.merging = found.merging
            decision.granule = math.gcd(decision.granule, found.granule, *begins)
            decision.unsure = 0 if found.is_sure else decision.unsure + 1
            return
        decision.way, decision.merging = None, None
        decision.reason = f"({found}); its last {decision.trainings} training calls were split"

    def tell_whole(self, name: str, reason: str, *, is_shared: bool) -> None:
        """Tell, once, that calls of the submodule `name` are not split.

        Raises `AloneOnly` if machines divide them.
        """
        if is_shared:
            found = f"split, it does not give what it gives for the whole batch {reason}"
            refuse_shared(name, found, self._advice)
        if name in self._told:
            return
        self._told.add(name)
        warn_user(
            f"{name} runs its batch in one piece, which takes the memory of all microbatches at once: split, it "
            f"does not give what it gives for the whole batch {reason}. If it can be split, {self._advice}. "
            "num_microbatch=1 says that nothing is to be split",
            TrainingWarning,
        )


def _begins(decision: SplitDecision, proposals: Sequence[rp_batch.Proposal], count: int) -> Sequence[int]:
    """Return where a call's microbatches begin, but the first."""
    sizes = (each.batch_size for each in proposals if each.way == decision.way)
    size = next(sizes, None)
    return () if size is None else cuts(rp_batch.part_sizes(size, min(count, size)))


def refuse_shared(name: str, reason: str, advice: str) -> NoReturn:
    """Refuse a call that machines would divide. They all do: they have found the reason together."""
    raise AloneOnly(
        f"{name} must run its batch in one piece, which several machines cannot divide: {reason}. If it can be "
        f"split, {advice}; or train on one machine"
    )
