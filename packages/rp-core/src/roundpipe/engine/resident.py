"""Parameters outside the wrapped parts of a model: plain PyTorch reads them on the host, the engine steps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from roundpipe.engine.host_parameters import HostParameters
from roundpipe.optimizer.steps import Part
from roundpipe.runtime.runtime import Runtime
from roundpipe.runtime.tickets import Take, own_turn


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
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        parts: Sequence[nn.Module],
        runtime: Runtime,
        optim_dtype: torch.dtype | None,
    ) -> None:
        holder = _Holder()

        def modules() -> Sequence[nn.Module]:
            return (holder.hold(_outside(model, parts)),)

        super().__init__(name, modules, runtime, "off", optim_dtype)

    def enter_call(self) -> None:
        """Wait until the weights are readable; they stay so until the next step is launched."""
        self._runtime.launch(partial(self._wait_for_weights, training=torch.is_grad_enabled()))

    def _wait_for_weights(self, *, training: bool) -> None:
        self.get_ready(training=training)
        for block in self.state.trainable:
            with own_turn(block.turns, write=False):
                pass

    def prepare_step(self, take: Take, *, is_async: bool) -> Part:
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

    def _note_written(self) -> None:
        # The engine writes past the version counters that tell autograd that a saved weight was overwritten.
        torch.autograd.graph.increment_version(self.state.trainable_tensors())
        for block in self.state.trainable:
            block.changed_outside()


def _outside(model: nn.Module, parts: Sequence[nn.Module]) -> Iterable[nn.Parameter]:
    """Each parameter of the modules that are not inside a part, once."""
    inside = {id(module) for part in parts for module in part.modules()}
    found = {
        id(parameter): parameter
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return found.values()
