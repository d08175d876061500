"""What code outside of the engine changes of a model's modules and weights, taken over between calls and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

import torch
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_state.modules.ownership import Claim
from rp_state.telling.weights import tell_written
from torch import nn

from rp_engine.engine.memory.memory_check import HostMemoryCheck
from rp_engine.optimizer.step_queue import StepQueue
from rp_engine.peers.peers import Peers, SharedModel


class Forward(Protocol):
    """A forward whose backward may still come."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward pass through it is still possible."""
        ...


@dataclass(slots=True)
class OutsideChanges:
    """Takes over what has changed of one model. Call every method on the launcher's thread.

    `modules`: returns the layers as they are now. `steps`: the model's. `note_rebuilt`: called once blocks were
    made anew, with those that were kept.
    """

    name: str
    modules: Callable[[], Sequence[nn.Module]]
    claim: Claim
    peers: Peers
    state: ModelState
    shared: SharedModel
    steps: StepQueue
    memory_check: HostMemoryCheck
    note_rebuilt: Callable[[Sequence[Block]], None]
    forwards: WeakSet[Forward] = field(default_factory=WeakSet["Forward"])

    def expect_backward(self, forward: Forward) -> None:
        """Keep the blocks that this forward's backward trains, for as long as it may come."""
        self.forwards.add(forward)

    def take_over(self, *, regroups: bool = True, samples: bool = False) -> None:
        """Take over changes of modules and weights made outside the engine.

        `samples`: also writes that version counters do not show, as far as a few numbers of each weight do.

        `regroups`: also move parameters that were frozen or unfrozen to blocks of their kind. A call that trains
        needs that. One without gradients does not, and a backward uses its forward's flags: so code that freezes
        adapters for a reference pass moves nothing.
        """
        samples = samples and (self.state.has_backs() or self._is_still())
        written = self.state.written_outside(samples=samples)
        changed = self._has_changed()
        is_regrouped = regroups and not changed and self._is_regrouping_due()
        if changed:
            self.steps.drain()
            written += self.state.moved_outside()
        if is_regrouped:
            self.steps.drain()
        if changed or is_regrouped:
            # Blocks that are made anew forget what was written past version counters.
            written += self.state.written_outside(samples=self.state.has_backs() or self._is_still())
        if written:
            self.steps.wait()
            # Settling would forget what others were written past their version counters.
            written += self.state.written_outside(samples=True)
            tell_written(self.name, self.state, written)
            self.set_masters(written)
            self.state.settle_written()
            self.shared.note_written(written)
        if changed:
            self._rebuild()
            self.state.health.note_changed("modules, parameters or buffers were added, replaced, removed or moved")
        elif written:
            # An earlier forward read other weights than its backward would.
            self.state.health.note_changed("weights were written or loaded by code outside of the engine")
        if is_regrouped:
            self._regroup()

    def are_there(self) -> bool:
        """Return whether modules or parameters have changed so that blocks will be made anew."""
        return self._has_changed() or self._is_regrouping_due()

    def _is_still(self) -> bool:
        """Return whether no step writes where calls read, without second blocks; machines may not know alike."""
        return self.peers.is_alone and not self.steps.writes()

    def _is_regrouping_due(self) -> bool:
        return bool(self.state.frozen() or self.state.unfrozen())

    def _regroup(self) -> None:
        """Move parameters that were frozen or unfrozen to blocks of their kind.

        While frozen ones may still get gradients, or have some that no step has read, all blocks stay but those of
        which a parameter was unfrozen. So no step's result must be published for that, and earlier forwards can
        still go backward.
        """
        unfrozen = self.state.unfrozen()
        if not self._keeps_frozen():
            self._rebuild()
            self.state.health.note_changed(
                "requires_grad of parameters was changed, for which blocks were rebuilt,"
            )
        elif unfrozen:
            self._rebuild([block for block in self.state.blocks if block not in unfrozen])

    def _keeps_frozen(self) -> bool:
        """Whether parameters that were frozen stay in trainable blocks; the same on all machines."""
        if not self.peers.is_alone or self.state.options.steps_in_backward:
            return False
        if any(forward.awaits_backward for forward in self.forwards):
            return True
        return any(i in block.gradient.written for block, i in self.state.frozen())

    def _rebuild(self, kept: Sequence[Block] = ()) -> None:
        """Rebuild all blocks but those `kept` over the layers' current tensors; nobody may use the old ones."""
        # A parameter that is no longer trained would never receive the last step's result.
        if self.state.unpublished:
            self.shared.same(f"rebuilding model {self.name!r}, whose tensors changed")
        if not kept:
            self.steps.publish()
        self.steps.wait()
        self.claim.take(self.state.modules)
        self.state.rebuild(lambda groups, _: self.memory_check.check_rebuilding(self.state, groups), kept)
        self.note_rebuilt(kept)

    def _has_changed(self) -> bool:
        self.state.modules = tuple(self.modules())
        return self.state.changed()

    def set_masters(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set the masters of these parameters from their weights."""
        for tensor in tensors:
            self.state.set_master(tensor)
        self.steps.results.take_over(tensors)
