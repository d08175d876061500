"""Values that the caller writes into a model's weights and masters: a state dict, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from rp_state.master import set_values
from rp_state.model_state import ModelState

from rp_engine.engine.host.parameters import HostParameters
from rp_engine.engine.memory.memory_check import HostMemoryCheck
from rp_engine.engine.memory.second_blocks import decide, want_for_restoring
from rp_engine.engine.model_read import ModelTensor, held_by
from rp_engine.runtime.runtime import Runtime


class Restoring:
    """Prepares the parts of a model for values that the caller writes, and goes on from these.

    A state dict: `make_current`, write the weights, `take_over`; then `set_masters` for values of more bits than
    weights have. A checkpoint: `begin`, `refuse_training`, write
    weights and masters, `end`. Call these inside `Runtime.launching`, which the caller holds meanwhile.
    """

    def __init__(
        self, name: str, hosts: Sequence[HostParameters], runtime: Runtime, memory_check: HostMemoryCheck
    ) -> None:
        self._name = name
        self._hosts = hosts
        self._runtime = runtime
        self._memory_check = memory_check

    # A state dict

    def make_current(self) -> None:
        """Wait for all work and publish the last result, so that the caller may write the weights."""
        self._carry_out(lambda host: host.make_current())

    def replaced(self, parameters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give replaced parameters the masters of the old ones; call it before `take_over`.

        `parameters`: the new parameter for each old one.
        """

        def replace(host: HostParameters) -> None:
            _replace(host.state, parameters)
            host.set_masters(list(parameters.values()))

        self._carry_out(replace)

    def take_over(self) -> None:
        """Update the masters from weights that the caller has written."""
        self._carry_out(lambda host: host.take_over())

    def set_masters(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Set the masters of these parameters to values that their weights have rounded. Drops all gradients."""
        held = self.begin(is_behind=False)
        self.refuse_training(is_behind=False)
        for one in held:
            if one.tensor in values and one.master is not None:
                set_values(one.master, values[one.tensor])
        self.end(is_behind=False)

    # A checkpoint

    def begin(self, *, is_behind: bool) -> tuple[ModelTensor, ...]:
        """Wait for all work; return the places that the caller loads a checkpoint into.

        `is_behind`: see `ModelBetweenSteps`.

        Raises `HostMemoryShort` if the masters and second blocks that this takes do not fit.
        """
        self.make_current()
        self._runtime.carry_out(partial(self._make_room, is_behind=is_behind))
        return tuple(held_by([host.state for host in self._hosts]))

    def _make_room(self, *, is_behind: bool) -> None:
        """Make the masters and second blocks that a checkpoint is loaded into; nothing is overwritten yet."""
        peers, kind = self._runtime.peers, f"room for a checkpoint in model {self._name!r}"
        states = [host.state for host in self._hosts]

        def want() -> None:
            for host in self._hosts:
                host.refresh()
                want_for_restoring(host.state, is_behind=is_behind)

        with peers.telling(kind):
            decide(self._memory_check, states, want)
            for state in states:
                state.make_masters()
                if is_behind and state.may_be_behind():
                    state.make_backs()
        peers.agree(kind, lambda: {"is_behind": is_behind}, None)

    def refuse_training(self, *, is_behind: bool) -> None:
        """From now on the caller writes weights and masters; until `end` the model refuses to train."""

        def refuse(host: HostParameters) -> None:
            host.state.health.note_failed_step("a checkpoint was loaded only in part")
            host.state.place_halves(behind=is_behind)

        self._carry_out(refuse)

    def end(self, *, is_behind: bool) -> None:
        """Go on from the weights and masters that the caller has written. `is_behind`: see `ModelBetweenSteps`."""
        self._carry_out(lambda host: host.restored(is_behind=is_behind))

    def _carry_out(self, do: Callable[[HostParameters], None]) -> None:
        def do_all() -> None:
            for host in self._hosts:
                do(host)

        self._runtime.carry_out(do_all)


def _replace(state: ModelState, parameters: Mapping[torch.Tensor, torch.Tensor]) -> None:
    for old, new in parameters.items():
        if new is not old and old in state.masters:
            state.masters[new] = state.masters.pop(old)
        if new is not old:
            state.shards.replace(old, new)
