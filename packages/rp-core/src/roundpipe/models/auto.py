"""AutoRoundPipe: a module some of whose submodules are RoundPipe models, with one optimizer step for all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn

import torch
from rp_calls import check_arguments, loss_of_whole, outer_batch, outputs_are_loss, refuse_label
from rp_checkpoint import ModelFacts
from rp_engine import LossFn, Resident, RoundPipeRunConfig, Runtime, WholeModel, default_runtime
from rp_engine.errors import RoundPipeError
from torch import nn

from roundpipe.models.base import RoundPipeBase, wrappers
from roundpipe.models.calls.surroundings import check_call
from roundpipe.models.calls.untraced import untraced
from roundpipe.models.part import Part
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.saved.facts import facts_of, take_settings
from roundpipe.models.side_outputs import refuse_hooked
from roundpipe.models.wrapped.options import WrapOptions

# Arguments of `RoundPipe` that were already given to the parts.
_PLACEHOLDERS = frozenset(field.name for field in fields(WrapOptions)) - {"optim_dtype", "runtime"}


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
    another. A sequence of layers is faster, and only that has `forward_backward`. Which dimension of its inputs is
    the batch, a part finds out by values, at its first call and where sizes become equal: what it gives in
    microbatches must be what it gives in one piece. Where no dimension is, it runs in one piece, with a warning.

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
            raise needs_row_error(self.name)
        self._own("runtime", _shared_runtime(parts, runtime))
        hosts = [part.engine.host for part in parts]
        resident = Resident(self.name, model, [part.model for part in parts], hosts, self.runtime, optim_dtype)
        self._own("_resident", resident)
        for host in hosts:
            host.share_steps(resident)
            host.state.is_inside = True
        self._own("_whole", WholeModel(self.name, [resident, *hosts], self.runtime))
        self._keep_current(model)

    parts: Mapping[str, RoundPipe]
    _resident: Resident

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on the host; backward works through its outputs.

        A Hugging Face model makes no key-value cache, unless ``use_cache=True`` asks for one, which is refused.

        Raises what a layer raises, and errors of earlier calls and steps that were not raised yet.
        """
        check_call(self, self.name, args=args, kwargs=kwargs)
        if "roundpipe_run_config" in kwargs:
            raise self._has_settings("roundpipe_run_config")
        for part in self.parts.values():
            if isinstance(part, Part):
                refuse_hooked(part.members)
        self._narrow.follow(self)
        self._resident.enter_call((args, kwargs))
        with self._resident.telling(), outer_batch(args, kwargs):
            return self.model(*args, **_without_cache(self.model, args, kwargs))

    @untraced
    def loss(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn = outputs_are_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Any:
        """Compute the loss of a batch without gradients, as `RoundPipe.loss`; with outputs if `return_outputs`.

        The model's own forward runs on the host under `torch.no_grad()` and its parts on the devices, with the
        training flags that they have. `loss_fn` then has the outputs of the whole batch and the whole `label`, on
        the host: there are no microbatches outside the parts, so a mean is one of the batch. Default: the loss
        among the outputs, or the outputs themselves.

        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner = nn.Linear(4, 4)
        ...     def forward(self, x):
        ...         return x + self.inner(x)
        >>> with Runtime("cpu:2") as runtime:
        ...     net = Net()
        ...     net.inner = RoundPipe(net.inner, runtime=runtime)
        ...     model = AutoRoundPipe(net).eval()
        ...     model.loss((torch.ones(2, 4),), label=torch.ones(2, 4), loss_fn=nn.functional.mse_loss).shape
        torch.Size([])

        Returns a loss of one element, or the list of losses that `loss_fn` returned. Several machines need not
        call it together, as it does not train: each computes the whole batch.

        Raises `TypeError` for a `run_config`, which single parts have from where they were wrapped, and for a
        loss of several elements; `ValueError` for a `label` without a `loss_fn`; and what `forward` raises.
        """
        check_arguments(input_args, input_kwargs, loss_fn)
        kwargs = dict(input_kwargs or {})
        if run_config is not None:
            raise self._has_settings("run_config")
        if loss_fn is outputs_are_loss:
            refuse_label(label, kwargs)
        with torch.no_grad():
            outputs = self.forward(*input_args, **kwargs)
            losses = loss_of_whole(outputs, label, loss_fn)
        return (losses, outputs) if return_outputs else losses

    def _has_settings(self, argument: str) -> TypeError:
        return TypeError(
            f"model {self.name!r} runs in parts, which have their settings from where it was wrapped, so a "
            f"call takes no {argument}; give wrap_model_to_roundpipe model_run_config=..., or "
            "override_config=... for single parts"
        )

    def forward_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: only a sequence of layers can run forward and backward in one call.

        Raises `RoundPipeError`.
        """
        del args, kwargs
        raise RoundPipeError(
            f"model {self.name!r} is not a sequence of layers, so it has no forward_backward; call the model, "
            "then backward() on the loss, or write it as an nn.Sequential and wrap that with RoundPipe"
        )

    def checkpoint_facts(self) -> ModelFacts:
        """Return how the model and its parts were trained, for its checkpoints."""
        return facts_of(self.named_model, self.optim_dtype, self.parts)

    def take_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Have the parts go on as was decided in the training of a checkpoint that is loaded, by part."""
        take_settings(self.parts, settings)


def needs_row_error(name: str) -> ValueError:
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
