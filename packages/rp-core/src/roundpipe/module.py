"""RoundPipe: a model whose layers stream through the devices."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import rp_batch
import torch
from torch import nn

from roundpipe.call import LossFn
from roundpipe.config import RoundPipeRunConfig
from roundpipe.context import doing_optimizer
from roundpipe.engine import Engine
from roundpipe.memory import MemoryReport
from roundpipe.packed import Arrivals
from roundpipe.runtime import Runtime, default_runtime
from roundpipe.state import PinMode


def _loss_is_output(outputs: Any, labels: Any) -> Any:
    del labels
    return outputs


def _caller() -> str:
    here = Path(__file__).parent
    frame = inspect.currentframe()
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(here):
        frame = frame.f_back
    if frame is None:
        return "unnamed"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class RoundPipe(nn.Module):
    """Trains a model whose weights, gradients and optimizer state stay in host memory.

    Args:
        model: an ``nn.Sequential``, each child a layer, or any other module, which is then one layer. On the CPU.
        optim_dtype: dtype of the optimizer's parameters; default: each parameter's own.
        name: shown in errors; default: the ``file:line`` of the call.
        model_run_config: settings for all calls, which each call's `run_config` may override.
        pin_model: ``"alloc"`` moves the weights into pinned blocks, ``"register"`` pins them where they are,
            ``"off"`` leaves them alone (for weights mapped from a file).
        runtime: the devices to run on; default: one shared by all models, see ``ROUNDPIPE_DEVICES``.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> with Runtime("cpu:2") as runtime:
    ...     model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    ...     optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    ...     loss = model.forward_backward(
    ...         input_args=(torch.ones(6, 4),), label=torch.ones(6, 1),
    ...         loss_fn=lambda outputs, labels: (outputs - labels).square().sum() / 6,
    ...     )
    ...     model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    ...     model.synchronize()

    Raises `ValueError` or `TypeError` for a model or a setting that cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: PinMode = "alloc",
        *,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        _check_model(model, pin_model, optim_dtype)
        self.model = model
        self.name = name or _caller()
        self.optim_dtype = optim_dtype
        self.model_run_config = model_run_config or RoundPipeRunConfig()
        self.runtime = runtime or default_runtime()
        layers = list(model) if isinstance(model, nn.Sequential) else [model]
        self._engine = Engine(self.name, layers, self.runtime, pin_model, optim_dtype)
        object.__setattr__(self, "original_model", None)

    # Calls

    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """Run the model like the one it wraps; the result is on the host and can be backpropagated through.

        Raises `RuntimeError` if gradients are asked for while torch's grad mode is off, and what a layer raises.
        """
        config = (roundpipe_run_config or RoundPipeRunConfig()).over(self.model_run_config)
        wants_grad = torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad
        if wants_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "requires_grad is True, but torch's grad mode is off; call under torch.enable_grad()"
            )
        _check_outputs(config)
        arrivals = Arrivals(self.runtime.backend, (args, kwargs))
        parts = self._split(args, kwargs, arrivals, config)
        return self._merge(self._engine.forward(parts, arrivals, config, wants_grad=wants_grad), parts, config)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn = _loss_is_output,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Any:
        """Run forward and backward over all microbatches in one go.

        Args:
            input_args, input_kwargs: what the model's forward takes.
            label: any tree; split like the inputs and given to `loss_fn`.
            loss_fn: ``(outputs, labels)`` of one microbatch, on its device, to a loss or a sequence of losses;
                default: the outputs are the loss.
            return_outputs: return ``(loss, outputs)``.

        Returns the sum of the losses over the microbatches, 0-dim on the host, or a list of such sums. Gradients
        are added to those there are, until a step function or `zero_grad` drops them.

        Raises `RuntimeError` while torch's grad mode is off; what a layer or `loss_fn` raises, with a note that
        says where.
        """
        _check_arguments(input_args)
        if not torch.is_grad_enabled():
            raise RuntimeError("forward_backward computes gradients, but torch's grad mode is off")
        config = (run_config or RoundPipeRunConfig()).over(self.model_run_config)
        _check_outputs(config)
        kwargs = dict(input_kwargs or {})
        arrivals = Arrivals(self.runtime.backend, (input_args, kwargs, label))
        parts = self._split(input_args, kwargs, arrivals, config)
        labels = rp_batch.split(label, len(parts), config.split_label, sizes=parts.sizes, exact=True, name="label")
        losses, outputs = self._engine.forward_backward(
            parts, labels, arrivals, loss_fn, config, keep=return_outputs
        )
        return (losses, self._merge(outputs, parts, config)) if return_outputs else losses

    def step(self, step_fn: Callable[..., object], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run ``step_fn(*args, **kwargs)`` on the optimizer's thread, over the gradients of all calls so far.

        An asynchronous step returns at once, and calls read its result after the next step (or `synchronize`). A
        synchronous one returns when it is done, and calls read its result from now on.

        Raises what a synchronous `step_fn` raises; an asynchronous one's error is raised by the next call.
        """
        if not callable(step_fn):
            raise TypeError(f"step_fn must be callable, but is a {type(step_fn).__name__} instead")
        self._engine.step(lambda: step_fn(*args, **kwargs), is_async=is_async)

    def synchronize(self) -> None:
        """Wait for everything; afterwards parameters are current and have their gradients in ``.grad``.

        Raises what failed since the last call.
        """
        self._engine.synchronize()

    def sync_optim_param(self) -> None:
        """Bring the results of all steps so far to the model's parameters; gradients go on where they are.

        On the training loop's thread it waits for the steps; calls read the result from now on, as after
        `synchronize`. Inside a step function the results of the steps before it are in the parameters already, and
        its own comes at its end if it is synchronous, otherwise with the next step: calls under way still read the
        weights, so it returns at once.

        Raises what failed since the last call.
        """
        self._engine.sync_optim_param()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients on the host, also those of a call that failed; `set_to_none` changes nothing."""
        del set_to_none
        self._engine.zero_grad()

    def reset(self) -> None:
        """Start again from the published weights: drop gradients, and a failed step's half-made update.

        The optimizer's own state, such as moments, is the caller's to reload.
        """
        self._engine.reset()

    def memory_report(self, *optimizers: torch.optim.Optimizer) -> MemoryReport:
        """What this model takes on the host, by kind, and what its runtime takes on the devices, now.

        Args:
            optimizers: whose state is counted, too; a model does not know its optimizers.

        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4, bias=False), runtime=runtime).memory_report().weights_bytes
        64

        Raises `TypeError` for what is no optimizer.
        """
        return self._engine.memory_report(optimizers)

    # Parameters

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters to give to an optimizer: one for each trainable parameter, in `optim_dtype`."""
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `optim_parameters`, with the names that ``model.named_parameters()`` gives."""
        masters = self._engine.masters()
        for name, parameter in self.model.named_parameters(prefix, remove_duplicate=remove_duplicate):
            if parameter.requires_grad:
                yield name, masters[parameter]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The optimizer's parameters inside a step function; elsewhere the model's own, with a warning."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """See `parameters`."""
        if doing_optimizer():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
            return
        warnings.warn(
            "these are the model's own parameters, which lag behind the optimizer's; give an optimizer "
            "model.optim_parameters(), or read model.model.parameters() after model.synchronize()",
            stacklevel=2,
        )
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; the optimizer's parameters become the loaded ones, and a failed step is forgotten.

        With `assign` the given tensors take the parameters' places, as in torch; tied parameters stay tied, and
        with ``pin_model="off"`` tensors of a memory-mapped file stay where they are.
        """
        with self._engine.replacing_weights():
            before = self._places()
            found = super().load_state_dict(state_dict, strict, assign)
            if assign:
                self._engine.replaced(self._keep_tied(before))
            return found

    def _places(self) -> dict[str, torch.Tensor]:
        # Torch leaves the types of this one open.
        return dict(nn.Module.named_parameters(self, remove_duplicate=False))

    def _keep_tied(self, before: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """What took each parameter's place; of several for a tied one, the last, as when values are copied."""
        after = self._places()
        replaced = {old: after[name] for name, old in before.items()}
        for name, old in before.items():
            if after[name] is not replaced[old]:
                module, _, own = name.rpartition(".")
                setattr(self.get_submodule(module), own, replaced[old])
        return replaced

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        del fn, recurse
        raise RuntimeError(
            "a RoundPipe model stays on the host in the dtype it was wrapped in; convert it before wrapping it"
        )

    def set_original_model(self, original_model: nn.Module) -> None:
        """Let attributes that this model lacks be found on the model it was made from."""
        object.__setattr__(self, "original_model", original_model)

    def train(self, mode: bool = True) -> RoundPipe:
        """Set training mode, on the model this was made from as well."""
        super().train(mode)
        if self.original_model is not None:
            self.original_model.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            for source in (self.__dict__.get("original_model"), self.__dict__["_modules"].get("model")):
                if source is not None and hasattr(source, name):
                    return getattr(source, name)
            raise

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arrivals: Arrivals, config: RoundPipeRunConfig
    ) -> rp_batch.Parts[Any]:
        count = config.num_microbatch or len(self.runtime.lanes) + 1
        parts = rp_batch.split((args, kwargs), count, config.split_input)
        arrivals.check(count, parts)
        return parts

    def _merge(self, outputs: Sequence[Any], parts: rp_batch.Parts[Any], config: RoundPipeRunConfig) -> Any:
        if config.merge_output is False:
            return outputs
        merged = rp_batch.merge(outputs, config.merge_output, sizes=parts.sizes)
        if config.output_device is None:
            return merged
        return rp_batch.map_leaves(
            lambda leaf: leaf.to(config.output_device) if isinstance(leaf, torch.Tensor) else leaf, merged
        )


def _check_model(model: object, pin_model: object, optim_dtype: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but is a {type(model).__name__} instead")
    if isinstance(model, nn.Sequential) and len(model) == 0:
        raise ValueError("the nn.Sequential has no layers; give it at least one")
    if pin_model not in get_args(PinMode):
        raise ValueError(f"pin_model must be 'alloc', 'register' or 'off', but is {pin_model!r} instead")
    if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
        raise TypeError(
            f"optim_dtype must be a floating-point torch.dtype or None, but is {optim_dtype!r} instead"
        )


def _check_outputs(config: RoundPipeRunConfig) -> None:
    """Before any work is done: that outputs can go where they are asked for."""
    there = config.output_device
    if there is None:
        return
    if config.merge_output is False and there.type != "cpu":
        raise ValueError(
            f"merge_output=False leaves outputs in microbatches on the host, but output_device is {there}; leave "
            "one of them None, or move the outputs yourself"
        )
    try:
        torch.empty(0, device=there)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"output_device is {there}, where torch can put no tensor: {error}") from error


def _check_arguments(input_args: object) -> None:
    if not isinstance(input_args, tuple):
        raise TypeError(f"input_args must be a tuple, but is a {type(input_args).__name__}; write (x,)")
