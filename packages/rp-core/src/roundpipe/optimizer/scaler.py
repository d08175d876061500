"""The gradient scaler of training loops: rp_optim's, with the thread that steps run on."""

from __future__ import annotations

import rp_optim

from roundpipe.runtime.runtime import Runtime, default_runtime


class GradScaler(rp_optim.GradScaler):
    """``torch.amp.GradScaler`` for models whose steps run behind the training loop.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        runtime: that of the models whose losses are scaled; default: the one of models that were given none.

    Scale the loss in the loss function, let the step function step through the scaler, and call `update` after
    ``model.step``. The next call's loss is scaled with the result of the update before, so nothing waits, and each
    loss is unscaled with the scale that it was scaled with.

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

    A skipped step changes no weight: calls go on with those of the step before.

    Raises `ValueError` for factors and intervals that cannot be.
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
