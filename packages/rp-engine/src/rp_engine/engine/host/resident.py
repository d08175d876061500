"""Parameters outside the wrapped parts of a model: plain PyTorch reads them on the host, the engine steps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from rp_state.block import Block
from rp_state.options import HostOptions
from torch import nn

from rp_engine.engine.host.parameters import HostParameters
from rp_engine.optimizer.model_step import ModelStep
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import Take, own_turn


class _Holder(nn.Module):
    """A layer that never runs: it presents loose parameters as a module."""

    def hold(self, parameters: Iterable[nn.Parameter]) -> _Holder:
        """Replace the held parameters by these; return itself."""
        self._parameters = {str(index): parameter for index, parameter in enumerate(parameters)}
        return self


class Resident(HostParameters):
    """The parameters of a model outside all of its wrapped parts, stepped and published like those of layers.

    With asynchronous steps, calls read the result of the step before the last one. Gradients are collected from
    ``.grad``, where autograd puts them.

    Args:
        parts: the modules that the parts run.
        hosts: the parts' parameters. A parameter of theirs that a module outside the parts has, too, belongs to
            them; it is read here as well.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        parts: Sequence[nn.Module],
        hosts: Sequence[HostParameters],
        runtime: Runtime,
        optim_dtype: torch.dtype | None,
    ) -> None:
        holder = _Holder()
        self._hosts = hosts
        self._shared: dict[int, nn.Parameter] = {}

        def modules() -> Sequence[nn.Module]:
            own, self._shared = _outside(model, parts)
            return (holder.hold(own.values()),)

        super().__init__(name, modules, runtime, HostOptions("off", optim_dtype, double_buffer=False))

    def enter_call(self, arguments: Any) -> None:
        """Wait until the weights are readable; they stay so until the next step is launched.

        `arguments`: a tree that several machines must have alike in training.
        """
        self._runtime.launch(
            partial(self._wait_for_weights, arguments, training=torch.is_grad_enabled()),
        )

    def _wait_for_weights(self, arguments: Any, *, training: bool) -> None:
        if training:
            with self._runtime.peers.telling(self._calling):
                self.get_ready(training=True)
            self.shared.same_call(self._calling, arguments)
        else:
            self.get_ready(training=False)
        self.note_read()
        for block in [*self.state.trainable, *self._shared_blocks()]:
            with own_turn(block.turns, write=False):
                pass

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other machines, which wait for this one in a part, of an error of the model's own forward."""
        if not torch.is_grad_enabled():
            return nullcontext()
        return self._runtime.peers.telling_early(self._calling, self._runtime.launch, lambda: True)

    @property
    def _calling(self) -> str:
        return f"a call of model {self.name!r}"

    def note_read(self) -> None:
        """Record which step's weights a call of the whole model reads, in its parts and outside of them."""
        self.read_delay = int(any(host.state.unpublished for host in (self, *self._hosts)))

    def prepare_step(self, take: Take, *, is_async: bool) -> ModelStep:
        """Take a step's turns; if it publishes weights, autograd then refuses backward through older graphs."""
        version = self.state.version
        part = super().prepare_step(take, is_async=is_async)
        if self.state.version != version:
            self._note_written()
        return part

    def publish(self) -> None:
        """See `HostParameters.publish`."""
        version = self.state.version
        super().publish()
        if self.state.version != version:
            self._note_written()

    def restored(self, *, is_behind: bool) -> None:
        """See `HostParameters.restored`."""
        super().restored(is_behind=is_behind)
        self._note_written()

    def _note_written(self) -> None:
        # The engine writes past the version counters that tell autograd that a saved weight was overwritten.
        for block in self.state.trainable:
            block.note_written(set(map(id, block.tensors)))
        for block in self._shared_blocks():
            block.note_written(set(self._shared))

    def _shared_blocks(self) -> list[Block]:
        blocks = [block for host in self._hosts for block in host.state.trainable] if self._shared else []
        return [block for block in blocks if any(id(tensor) in self._shared for tensor in block.tensors)]


_Parameters = dict[int, nn.Parameter]


def _outside(model: nn.Module, parts: Sequence[nn.Module]) -> tuple[_Parameters, _Parameters]:
    """The parameters of the modules outside the parts, by id: those that no part has, and the others."""
    inside = {id(module) for part in parts for module in part.modules()}
    theirs = {id(parameter) for part in parts for parameter in part.parameters()}
    found = {
        id(parameter): parameter
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    own = {key: parameter for key, parameter in found.items() if key not in theirs}
    return own, {key: parameter for key, parameter in found.items() if key in theirs}
