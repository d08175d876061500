"""The division of a call whose settings leave it open: tried by values, and remembered by kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import rp_batch
import torch
from rp_batch.spec import MergeRule
from rp_engine import Engine, RoundPipeRunConfig, Runtime
from rp_engine.wrapping import View
from rp_sched import Mode
from torch import nn

from rp_calls.dividing.decisions import SplitDecision, SplitDecisions, refuse_shared
from rp_calls.dividing.rows import rows_at_end
from rp_calls.dividing.trial import Fit, FoundSplit, SplitTrial
from rp_calls.microbatching import in_one_piece, num_microbatches

# In units of the dtype's epsilon.
_ROUNDINGS = 8


@dataclass(frozen=True, slots=True)
class CallToSplit:
    """A call that is to be divided.

    `name`: of the module, in warnings. `kind`: what calls that are alike have in common, beside their arguments
    and the modules' modes. `arguments`: the pair (args, kwargs). `address`: makes the engine's arguments from the
    call's, for each microbatch. `fit`: finds how outputs merge. `is_loss`: it computes a loss without
    gradients, which several machines divide, as calls that train.
    """

    name: str
    kind: Hashable
    config: RoundPipeRunConfig
    arguments: Any
    address: Callable[[rp_batch.Parts[Any]], rp_batch.Parts[Any]]
    fit: Fit
    is_loss: bool = False


@dataclass(frozen=True, slots=True)
class TrialPolicy:
    """How the models of one sort are tried. `view`, `is_brief`: see `SplitTrial`.

    `advice`: what their users can do about a call that is not split.
    """

    advice: str
    view: View | None = None
    is_brief: bool = False


PART = TrialPolicy(
    "say how in its settings (split_input and merge_output of override_config); it can also stay on the host "
    "(skip_modules)"
)
# Also of one layer.
ROW = TrialPolicy(
    "say how in its run config (split_input, and split_label and merge_output where these are not along the first "
    "dimension)",
    rows_at_end,
    is_brief=True,
)


@dataclass(frozen=True, slots=True)
class SplitCall:
    """A call in microbatches. `merging`: the spec that merges its outputs, if a trial of this `kind` found it.

    `way`: how it is split, if a trial found it.
    """

    parts: rp_batch.Parts[Any]
    merging: Any = None
    kind: Hashable = None
    way: rp_batch.Way | None = None

    def fits(self, outputs: Sequence[Any]) -> bool:
        """Return whether the outputs are as they were at the trial: in structure, and in what is equal in all.

        >>> divided = SplitCall(rp_batch.Parts([1, 2]), (rp_batch.Concat(), rp_batch.Equal()))
        >>> [divided.fits([(x, 2), (x, y)]) for x, y in ((0, 2), (0, 3), ([], 2))]
        [True, False, False]
        """
        if self.merging is None:
            return True
        rules, structure = rp_batch.flatten(self.merging)
        leaves, structures = zip(*map(rp_batch.flatten, outputs), strict=True)
        return all(map(structure.__eq__, structures)) and all(
            rp_batch.are_same(column)
            for rule, column in zip(rules, zip(*leaves, strict=True), strict=True)
            if isinstance(rule, rp_batch.Equal)
        )

    def loosened(self, outputs: Sequence[Any]) -> SplitCall:
        """Return it with means in place of equality where these outputs differ, but in roundings alone.

        Numbers that are zero but for roundings may be equal in a trial, and not in the call. Roundings are those
        of sums of numbers as large as the largest of the outputs.

        >>> divided = SplitCall(rp_batch.Parts([1, 2]), (rp_batch.Concat(), rp_batch.Equal()))
        >>> rows, zero = torch.ones(2), torch.tensor(0.0)
        >>> [divided.loosened([(rows, zero), (rows, zero + far)]).merging[1] for far in (0.0, 1e-8, 1e-2)]
        [Equal(), Mean(), Equal()]
        """
        if self.merging is None or self.fits(outputs):
            return self
        rules, structure = rp_batch.flatten(self.merging)
        leaves, structures = zip(*map(rp_batch.flatten, outputs), strict=True)
        if not all(map(structure.__eq__, structures)):
            return self
        largest = max((float(leaf.abs().max()) for leaf in chain(*leaves) if _has_roundings(leaf)), default=0.0)
        pairs = zip(rules, zip(*leaves, strict=True), strict=True)
        loose = [_loosened(rule, column, largest) for rule, column in pairs]
        return replace(self, merging=rp_batch.unflatten(structure, loose))

    def is_alike(self, other: SplitCall) -> bool:
        """Return whether the other one has the same microbatches."""
        return (self.way, self.parts.sizes) == (other.way, other.parts.sizes)


def _has_roundings(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def _loosened(rule: MergeRule, column: Sequence[Any], largest: float) -> MergeRule:
    first = column[0]
    if not isinstance(rule, rp_batch.Equal) or rp_batch.are_same(column) or not all(map(_has_roundings, column)):
        return rule
    if any((leaf.shape, leaf.dtype) != (first.shape, first.dtype) for leaf in column):
        return rule
    apart = max(float((leaf - first).abs().max()) for leaf in column)
    return rp_batch.Mean() if apart <= _ROUNDINGS * torch.finfo(first.dtype).eps * largest else rule


class TrialSplitter:
    """Divides the calls of one model, whose `modules` it may put in another mode for a trial."""

    def __init__(
        self, engine: Engine, runtime: Runtime, modules: Sequence[nn.Module], policy: TrialPolicy
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._modules = modules
        self._policy = policy
        self._decisions = SplitDecisions(policy.advice)

    def divide(self, asked: CallToSplit, proposals: rp_batch.Proposals, mode: Mode = "train") -> SplitCall:
        """Return the call in microbatches: as many as its settings say, or one if no proposal is right.

        Raises `AloneOnly` if it would be one, but machines divide it.
        """
        if not proposals.found and asked.config.num_microbatch != 1 and self._is_shared(asked):
            refuse_shared(asked.name, "no dimension of its arguments looks like a batch", self._policy.advice)
        count = self._count(asked, proposals, mode)
        if count == 1:
            return SplitCall(rp_batch.split(asked.arguments, 1))
        kind, decision = self._decision(asked, proposals, count)
        chosen = next((each for each in proposals.found if each.way == decision.way), None)
        if chosen is None:
            return SplitCall(in_one_piece(asked.name, asked.arguments, asked.config))
        return SplitCall(rp_batch.split(asked.arguments, count, chosen.spec), decision.merging, kind, chosen.way)

    def is_right(
        self, asked: CallToSplit, proposals: rp_batch.Proposals, count: int, *, merges: bool = False
    ) -> bool:
        """Return whether the call can be split as proposed, into this many microbatches.

        `merges`: its outputs are merged by default rules; `merging` of what `fit` found is why that is not right.
        """
        decision = self._decision(asked, proposals, count)[1]
        if decision.way is None or not merges or decision.merging is None:
            return decision.way is not None
        self._decisions.tell_whole(asked.name, f"({decision.merging})", is_shared=self._is_shared(asked))
        return False

    def _decision(
        self, asked: CallToSplit, proposals: rp_batch.Proposals, count: int
    ) -> tuple[Hashable, SplitDecision]:
        trains, is_shared = self._trains(asked), self._is_shared(asked)
        kind = (asked.kind, is_shared, self._flags(), proposals.pattern)
        attempt = partial(self._attempt, asked, count, is_shared=is_shared)
        found = self._decisions.of(
            kind, asked.name, proposals.found, attempt, trains=trains, count=count, is_shared=is_shared
        )
        return kind, found

    def forget(self, divided: SplitCall) -> None:
        """Try calls of this kind anew: this one returned something else than at the trial (`SplitCall.fits`)."""
        self._decisions.forget(divided.kind)

    def _trains(self, asked: CallToSplit) -> bool:
        return self._engine.trains(asked.config, asked.arguments)

    def _is_shared(self, asked: CallToSplit) -> bool:
        """Return whether several machines divide the call's microbatches."""
        return not self._runtime.peers.is_alone and (asked.is_loss or self._trains(asked))

    def _count(self, asked: CallToSplit, proposals: rp_batch.Proposals, mode: Mode) -> int:
        if not proposals.found:
            return 1
        spec = proposals.found[0].spec
        return num_microbatches(self._engine, self._runtime, asked.arguments, spec, asked.config, mode)

    def _flags(self) -> tuple[bool, ...]:
        return tuple(module.training for root in self._modules for module in root.modules())

    def _attempt(
        self, asked: CallToSplit, count: int, proposals: Sequence[rp_batch.Proposal], *, is_shared: bool
    ) -> FoundSplit | str:
        trial = SplitTrial(
            self._engine,
            self._runtime,
            self._modules,
            asked.config,
            asked.arguments,
            asked.address,
            asked.fit,
            self._policy.view,
            self._policy.is_brief,
        )
        decide = partial(trial.first_that_fits, proposals, count)
        if not is_shared:
            return decide()
        return self._together(f"finding how {asked.name} can be split", decide)

    def _together(self, what: str, decide: Callable[[], FoundSplit | str]) -> FoundSplit | str:
        found, is_same = self._engine.decide_together(what, decide, repr)
        if is_same:
            return found
        # Machines may have different numbers of microbatches, which the call itself refuses.
        found, is_same = self._engine.decide_together(what, lambda: _cut_anywhere(found), repr)
        return found if is_same else "machines found different things"


def _cut_anywhere(found: FoundSplit | str) -> FoundSplit | str:
    return replace(found, granule=1) if isinstance(found, FoundSplit) else found
