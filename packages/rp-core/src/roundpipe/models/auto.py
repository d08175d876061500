"""AutoRoundPipe: a module some of whose submodules are RoundPipe models, with one optimizer step for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.device.replica import named_modules
from roundpipe.engine.group import Joint
from roundpipe.engine.resident import Resident
from roundpipe.errors import RoundPipeError
from roundpipe.models.base import RoundPipeBase
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.runtime.runtime import Runtime, default_runtime

# Arguments of `RoundPipe` that were already given to the parts.
_PLACEHOLDERS = frozenset({"compile_layers", "double_buffer", "model_run_config", "pin_model"})


class AutoRoundPipe(RoundPipeBase):
    """Trains a module that is not a sequence of layers: its forward runs on the host, its parts on the devices.

    Args:
        model: any module on the CPU, some of whose submodules are `RoundPipe` models: its parts.
        name: shown in errors; default: the ``file:line`` of the call.
        optim_dtype: dtype of the optimizer's parameters outside the parts; default: each parameter's own.
        runtime: the runtime of the parts; without parts, the default one.
        kwargs: other arguments of `RoundPipe`; accepted and ignored, since the parts have theirs.

    `wrap_model_to_roundpipe` makes one from a module. `forward`, ``backward()``, `step`, `synchronize` and the
    optimizer's parameters work as for `RoundPipe`, also for parameters outside the parts. Each part splits its own
    inputs into microbatches and gathers its outputs on the host, so parts run one after another. A sequence of
    layers is faster, and only that has `forward_backward`.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    ...     def forward(self, x):
    ...         return x + self.scale * self.inner(x)
    >>> with Runtime("cpu:2") as runtime:
    ...     net = Net()
    ...     net.inner = RoundPipe(net.inner, runtime=runtime)
    ...     model = AutoRoundPipe(net)
    ...     optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    ...     model(torch.ones(2, 4)).sum().backward()
    ...     model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    ...     model.synchronize()
    >>> [name for name, _ in model.optim_named_parameters()]
    ['scale', 'inner.weight', 'inner.bias']

    Raises `ValueError` or `TypeError` for a model or an argument that cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str | None = None,
        optim_dtype: torch.dtype | None = None,
        *,
        runtime: Runtime | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, name, optim_dtype)
        if unknown := sorted(set(kwargs) - _PLACEHOLDERS):
            raise TypeError(f"AutoRoundPipe got an unknown argument {unknown[0]!r}; leave it out")
        parts = _parts(model)
        self._own("runtime", _shared_runtime(parts, runtime))
        self._own("_resident", Resident(self.name, model, parts, self.runtime, optim_dtype))
        hosts = [self._resident, *(part.engine.host for part in parts)]
        for host in hosts[1:]:
            host.share_steps(self._resident)
        self._own("_joint", Joint(self.name, hosts, self.runtime))

    _resident: Resident

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on the host; backward works through its outputs.

        Raises what a layer raises, and errors of earlier calls and steps that were not raised yet.
        """
        self._resident.enter_call()
        return self.model(*args, **kwargs)

    def forward_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: only a sequence of layers can run forward and backward in one call.

        Raises `RoundPipeError`.
        """
        del args, kwargs
        raise RoundPipeError(
            f"model {self.name!r} is not a sequence of layers, so it has no forward_backward; call the model, "
            "then backward() on the loss, or write it as an nn.Sequential and wrap that with RoundPipe"
        )

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `optim_parameters`, with the names that parameters had before the parts were wrapped."""
        names = [name for name, module in named_modules(self.model, prefix) if isinstance(module, RoundPipe)]
        for name, parameter in super().optim_named_parameters(prefix, remove_duplicate):
            yield _unwrapped(name, names), parameter


def _unwrapped(name: str, parts: list[str]) -> str:
    for part in parts:
        inner = f"{part}.model."
        if name.startswith(inner):
            return f"{part}.{name.removeprefix(inner)}"
    return name


def _parts(model: nn.Module) -> list[RoundPipe]:
    for name, module in named_modules(model):
        if isinstance(module, AutoRoundPipe):
            raise TypeError(f"{name!r} in the model is an AutoRoundPipe already; wrap the whole only")
    return [module for module in model.modules() if isinstance(module, RoundPipe)]


def _shared_runtime(parts: list[RoundPipe], runtime: Runtime | None) -> Runtime:
    found = {id(part.runtime): part.runtime for part in parts}
    if runtime is not None:
        found[id(runtime)] = runtime
    if len(found) > 1:
        raise ValueError("all parts of a model must share a runtime; wrap them with the same one")
    return next(iter(found.values()), None) or default_runtime()
