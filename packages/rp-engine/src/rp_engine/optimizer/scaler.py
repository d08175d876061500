"""The loss scaler for training loops: `rp_optim.GradScaler` bound to a runtime's optimizer thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import rp_optim

from rp_engine.context import is_stepping_in_backward
from rp_engine.errors import RoundPipeError
from rp_engine.runtime.runtime import Runtime, default_runtime

_Outputs = TypeVar("_Outputs", bound=Any)


class GradScaler(rp_optim.GradScaler):
    """``torch.amp.GradScaler`` for models whose steps run asynchronously.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        runtime: the runtime of the models whose losses are scaled; default: the shared default runtime.

    Scale the loss in the loss function, call ``scaler.step(optimizer)`` in the step function, and call `update`
    after ``model.step``. The training loop does not wait for the latest update: it uses the scale of the previous
    one. Each gradient is unscaled with the scale that its loss was multiplied by.

    >>> import torch
    >>> from roundpipe import RoundPipe
    >>> with Runtime("cpu") as runtime:
    ...     model = RoundPipe(torch.nn.Linear(2, 1), runtime=runtime)
    ...     optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    ...     scaler = GradScaler(init_scale=8.0, runtime=runtime)
    ...     loss = model.forward_backward(
    ...         input_args=(torch.ones(3, 2),), loss_fn=lambda outputs, _: scaler.scale(outputs.sum())
    ...     )
    ...     model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
    ...     scaler.update()
    ...     model.synchronize()

    A skipped step changes no weight. A deep copy steps on the same thread; one that was pickled belongs to the
    default runtime of the process that loads it.

    Raises `ValueError` for factors and intervals out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        thread = (runtime or default_runtime()).optimizer
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled, thread=thread)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Begin with what was pickled; steps run on the thread of the default runtime."""
        self._begin_from(state, default_runtime().optimizer)

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply a tensor, or each tensor of an iterable, which may be nested, by the scale.

        Raises `TypeError` for anything else; `RoundPipeError` in a call in which the optimizer steps.
        """
        if self.enabled and is_stepping_in_backward():
            raise RoundPipeError(
                "a GradScaler's scale was requested in a call in which the optimizer steps "
                "(step_in_backward=True): gradients are consumed before all could be checked for infinities; "
                "train in bf16, which needs no scale, or wrap the model without step_in_backward"
            )
        return super().scale(outputs)
