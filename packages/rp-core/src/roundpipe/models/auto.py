"""AutoRoundPipe: a module some of whose submodules are RoundPipe models, with one optimizer step for all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.engine.resident import Resident
from roundpipe.engine.whole_model import WholeModel
from roundpipe.errors import RoundPipeError
from roundpipe.models.base import RoundPipeBase, wrappers
from roundpipe.models.part import Part
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.side_outputs import refuse_hooked
from roundpipe.runtime.runtime import Runtime, default_runtime

# Arguments of `RoundPipe` that were already given to the parts.
_PLACEHOLDERS = frozenset(
    {"compile_layers", "double_buffer", "master", "model_run_config", "pin_model", "step_in_backward"}
)


class AutoRoundPipe(RoundPipeBase):
    """Trains a module that is not a sequence of layers: its forward runs on the host, its parts on the devices.

    Args:
        model: any module on the CPU, some of whose submodules are `RoundPipe` models, or are run by them: its
            parts.
        name: shown in errors; default: the ``file:line`` of the call.
        optim_dtype: dtype of the optimizer's parameters outside the parts; default: each parameter's own.
        runtime: the runtime of the parts; without parts, the default one.
        kwargs: other arguments of `RoundPipe`; accepted and ignored, since the parts have theirs.

    `wrap_model_to_roundpipe` makes one from a module. `parts`: the parts by the names of the submodules that they
    run; one that runs several, which share parameters, has several names. `forward`, ``backward()``, `step`,
    `synchronize` and the optimizer's parameters work as for `RoundPipe`, also for parameters outside the parts.
    Each part splits its own inputs into microbatches and gathers its outputs on the host, so parts run one after
    another. A sequence of layers is faster, and only that has `forward_backward`.

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
        self._own("parts", _parts(model))
        parts = list(dict.fromkeys(self.parts.values()))
        if any(part.engine.host.state.options.steps_in_backward for part in parts):
            raise not_a_row(self.name)
        self._own("runtime", _shared_runtime(parts, runtime))
        hosts = [part.engine.host for part in parts]
        resident = Resident(self.name, model, [part.model for part in parts], hosts, self.runtime, optim_dtype)
        self._own("_resident", resident)
        for host in hosts:
            host.share_steps(resident)
        self._own("_whole", WholeModel(self.name, [resident, *hosts], self.runtime))
        self._keep_current(model)

    parts: Mapping[str, RoundPipe]
    _resident: Resident

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on the host; backward works through its outputs.

        A Hugging Face model makes no key-value cache, unless ``use_cache=True`` asks for one, which is refused.

        Raises what a layer raises, and errors of earlier calls and steps that were not raised yet.
        """
        for part in self.parts.values():
            if isinstance(part, Part):
                refuse_hooked(part.members)
        self._resident.enter_call((args, kwargs))
        with self._resident.telling():
            return self.model(*args, **_without_cache(self.model, args, kwargs))

    def forward_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: only a sequence of layers can run forward and backward in one call.

        Raises `RoundPipeError`.
        """
        del args, kwargs
        raise RoundPipeError(
            f"model {self.name!r} is not a sequence of layers, so it has no forward_backward; call the model, "
            "then backward() on the loss, or write it as an nn.Sequential and wrap that with RoundPipe"
        )


def not_a_row(name: str) -> ValueError:
    """The error of a model that has no `forward_backward`, in which its optimizer was to step."""
    return ValueError(
        f"step_in_backward=True needs a sequence of layers, whose forward_backward the optimizer steps in, but "
        f"model {name!r} runs in parts, forward and backward apart; leave it out"
    )


def _without_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with ``use_cache=False`` if the model's configuration alone asks for a cache."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", lambda: config)()
    if not any(getattr(found, "use_cache", False) for found in (config, inner)):
        return kwargs
    is_asked = not _takes(model.forward, "use_cache", args) or "use_cache" in kwargs
    return kwargs if is_asked else {**kwargs, "use_cache": False}


def _takes(function: Callable[..., Any], name: str, args: tuple[Any, ...]) -> bool:
    """Whether the function takes an argument of this name that `args` do not give."""
    parameters = list(inspect.signature(function).parameters.values())
    left = parameters[len(args) :]
    if any(parameter.name == name for parameter in parameters):
        return any(parameter.name == name for parameter in left)
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parts(model: nn.Module) -> dict[str, RoundPipe]:
    found: dict[str, RoundPipe] = {}
    for name, wrapper in wrappers(model):
        if not isinstance(wrapper, RoundPipe):
            raise TypeError(f"{name!r} in the model is an AutoRoundPipe already; wrap the whole only")
        found[name] = wrapper
    return found


def _shared_runtime(parts: list[RoundPipe], runtime: Runtime | None) -> Runtime:
    found = {id(part.runtime): part.runtime for part in parts}
    if runtime is not None:
        found[id(runtime)] = runtime
    if len(found) > 1:
        raise ValueError("all parts of a model must share a runtime; wrap them with the same one")
    return next(iter(found.values()), None) or default_runtime()
