"""What is done with a whole model between its calls, over one engine or several: steps, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from roundpipe.engine.engine import Engine, told
from roundpipe.engine.memory_report import MemoryReport, memory_report
from roundpipe.optimizer.steps import run_step
from roundpipe.runtime.runtime import Runtime, lasting
from roundpipe.runtime.tickets import taking


class Joint:
    """The engines of one model: a single one, or those of the parts that a model was taken apart into.

    Each method holds the runtime's launch lock once for all of them.
    """

    def __init__(self, name: str, engines: Sequence[Engine], runtime: Runtime) -> None:
        self._name = name
        self._engines = tuple(engines)
        self._runtime = runtime

    def masters(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """The optimizer's parameter of each trainable one."""
        return {parameter: master for engine in self._engines for parameter, master in engine.masters().items()}

    def step(self, step_fn: Callable[[], object], *, is_async: bool) -> None:
        """Run a step function over the gradients of all calls so far."""
        with self._runtime.launching(), told(self._name, "step"):
            for engine in self._engines:
                engine.get_ready(training=True)
            with taking() as take:
                parts = [engine.prepare_step(take, is_async=is_async) for engine in self._engines]
                future = self._engines[0].submit_step(partial(run_step, self._name, parts, step_fn))
            for part in parts:
                part.note_launched()
            if not is_async:
                future.exception()
                self._raise_late_errors()

    def synchronize(self) -> None:
        """Wait for everything, publish the last result and show the gradients."""
        with self._runtime.launching(), told(self._name, "synchronize"):
            for engine in self._engines:
                engine.drain()
                engine.publish()
            for engine in self._engines:
                engine.show_gradients()

    def sync_optim_param(self) -> None:
        """Publish the last result and wait for it; a step function finds that of the steps before it published."""
        if self._runtime.optimizer.is_current() and all(engine.state.is_stepping for engine in self._engines):
            return
        with self._runtime.launching(), told(self._name, "sync_optim_param"):
            for engine in self._engines:
                engine.raise_late_errors()
                # A model with nothing to publish keeps its gradients where code outside reads them.
                if engine.state.unpublished:
                    engine.publish()

    def memory_report(self, optimizers: Sequence[object]) -> MemoryReport:
        """What the model takes, as it is now."""
        foreseen = [engine.predicted_bytes for engine in self._engines]
        predicted = max((nbytes for nbytes in foreseen if nbytes is not None), default=None)
        return memory_report(self._runtime, [engine.state for engine in self._engines], optimizers, predicted)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        with self._runtime.launching(), lasting():
            for engine in self._engines:
                engine.drop_gradients()

    def reset(self) -> None:
        """Drop gradients and go back to the published weights."""
        with self._runtime.launching(), lasting():
            for engine in self._engines:
                engine.reset()

    @contextmanager
    def replacing_weights(self) -> Generator[None]:
        """Within it the caller may write the weights, which are current; their masters follow at its end."""
        with self._runtime.launching(), lasting(), ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.replacing_weights())
            yield

    def replaced(self, parameters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Within `replacing_weights`: new parameters, by the old ones, keep the optimizer's masters."""
        for engine in self._engines:
            engine.replaced(parameters)

    def _raise_late_errors(self) -> None:
        for engine in self._engines:
            engine.raise_late_errors()
