"""RoundPipe: a model whose weights stay on the host and whose layers run on the devices in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import rp_batch
import torch
from rp_sched import LayerCost, Mode
from torch import nn

from roundpipe.device.compiling import options_of
from roundpipe.engine.engine import Engine
from roundpipe.engine.step_during import StepDuring
from roundpipe.engine.whole_model import WholeModel
from roundpipe.execution.call import LossFn
from roundpipe.execution.packed_data import Arrivals
from roundpipe.models.base import RoundPipeBase, wrappers
from roundpipe.models.calls.microbatching import declared_spec, num_microbatches
from roundpipe.models.calls.outputs import check_outputs, placed
from roundpipe.models.calls.own_loss import call_loss, outputs_are_loss, with_loss
from roundpipe.models.wrapped.master_dtype import master_dtype
from roundpipe.models.wrapped.row import row_of
from roundpipe.planning.call_log import CallTime
from roundpipe.runtime.runtime import Runtime, default_runtime
from roundpipe.settings.run_config import RoundPipeRunConfig, given
from roundpipe.state.layers import PinMode
from roundpipe.state.model_state import HostOptions, MasterKind


class RoundPipe(RoundPipeBase):
    """Trains a model whose weights, gradients and optimizer state stay in host memory.

    Args:
        model: an ``nn.Sequential``, each child a layer, or any other module, which is then one layer. On the CPU.
        optim_dtype: dtype of the master weights; default: each parameter's own. With 16-bit weights use
            `torch.float32`: bf16 masters take half the memory, but lose updates below 1/256 of a weight.
        master: ``"whole"``, or ``"split"``: a bf16 weight is the upper half of its fp32 master, beside which 16
            bits of remainder are kept, so `optim_dtype` is fp32. The optimizers of `roundpipe.optim` then take 14
            bytes a parameter with synchronous steps and 16 with asynchronous ones, with the masters' numbers of
            ``"whole"``; weights are the masters rounded to nearest, ties away from zero. A synchronous step
            updates the weights in place: if it fails, they are torn, and a state must be loaded, unless
            `double_buffer` is True. Other weights keep whole masters, as do all with torch's own optimizers.
        name: shown in errors; default: the ``file:line`` of the call.
        model_run_config: settings for all calls, which each call's `run_config` may override.
        pin_model: ``"alloc"`` moves the weights into pinned blocks, ``"register"`` pins them where they are,
            ``"off"`` leaves them as they are (for weights mapped from a file).
        runtime: the devices to run on; default: one shared by all models, see ``ROUNDPIPE_DEVICES``.
        step_in_backward: each training call is given the optimizer, ``forward_backward(optimizer=...)``, and
            steps every layer as soon as its gradients are complete. Gradients are not kept: layers pass the memory
            for them on, so they take 2 bytes for a few layers only (with `master="split"` and AdamW, 12 bytes a
            parameter in all). The numbers are those of a synchronous step after each call. There are no gradients
            to clip, scale, accumulate or read, so `step`, ``.grad`` and `backward` of `forward` are refused.
        compile_layers: compile the layers with `torch.compile`; a dict gives its arguments. Layers of one kind
            share a compilation on each device. The first call of each kind compiles, which takes a while. With
            `True`, C++ code launches the kernels, so that threads of several devices do not wait for the GIL; this
            takes longer to compile than an empty dict.
        double_buffer: keep a second copy of the weights, if `pin_model` is ``"alloc"``. Steps then write their
            result while calls still read the old weights, so small batches are faster. Default: if the copy takes
            no more than a sixteenth of the host's memory, and all fits; with masters in halves, from the first
            asynchronous step on. Tensors that share memory with a
            parameter, such as those of a `state_dict()`, are then valid until the next step only: clone them to
            keep the values, get them again to read current ones.

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

    An ``nn.Sequential`` that overrides `forward` is one layer, too.

    Raises `ValueError` or `TypeError` for an unsupported model or an invalid setting.
    """

    model_run_config: RoundPipeRunConfig
    _engine: Engine

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: PinMode = "alloc",
        *,
        runtime: Runtime | None = None,
        compile_layers: bool | Mapping[str, Any] = False,
        double_buffer: bool | None = None,
        master: MasterKind = "whole",
        step_in_backward: bool = False,
    ) -> None:
        super().__init__(model, name, master_dtype(master, optim_dtype))
        _check_model(model, pin_model, runtime, double_buffer)
        options = HostOptions(
            pin_model,
            self.optim_dtype,
            double_buffer,
            master,
            steps_in_backward=_checked_flag("step_in_backward", step_in_backward),
        )
        compile_options = options_of(compile_layers)
        self._own("_refused", {})
        self._own("model_run_config", given("model_run_config", model_run_config))
        self._own("runtime", runtime or default_runtime())
        engine = Engine(self.name, partial(row_of, model), self.runtime, options, compile_options)
        self._own("_engine", engine)
        self._own("_whole", WholeModel(self.name, [engine.host], self.runtime))
        self._keep_current(model)

    _refused: dict[str, str]

    # Calls

    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """Run the wrapped model; its outputs are on the host by default, and backward works through them.

        Outputs with a loss have that of the whole batch, as in `forward_backward`. In microbatches
        (``merge_output=False``) each has its own.

        Raises `RuntimeError` if gradients are requested while torch's grad mode is off; `ValueError` for a loss of
        several microbatches, if it is unknown what each contributes; and what a layer raises.
        """
        config = given("roundpipe_run_config", roundpipe_run_config).over(self.model_run_config)
        with self._engine.telling_forward(config, (args, kwargs)):
            self._refuse_call(kwargs)
            stays_split = config.merge_output is False
            chosen = None if stays_split else call_loss(self.model, kwargs, None, outputs_are_loss, None)
            kwargs = kwargs if chosen is None else dict(chosen.kwargs)
            arrivals = Arrivals(self.runtime.backend, (args, kwargs))
            parts = self._split(args, kwargs, arrivals, config)
        outputs = self._run(parts, arrivals, config)
        if chosen is None:
            return outputs
        loss = placed(chosen.loss_of(parts, outputs), config)
        return with_loss(self._merge(outputs, parts, config), loss)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn = outputs_are_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Any:
        """Run forward, loss and backward of all microbatches in one call.

        Args:
            input_args, input_kwargs: arguments of the model's forward.
            label: any tree; split like the inputs and passed to `loss_fn`.
            loss_fn: maps ``(outputs, label)`` of one microbatch, on its device, to a loss or a sequence of
                losses, which are summed over the microbatches; `token_mean` makes one that is a mean over the
                batch. Default: the model's own loss, or else the outputs are the loss.
            return_outputs: return ``(loss, outputs)``.
            run_config: settings of this call, over `model_run_config`.
            optimizer: with ``step_in_backward=True``, which requires it unless all parameters are frozen: one of
                `roundpipe.optim`, over all of `optim_parameters()`, which steps during this call. When the call
                returns, the step is taken, and the next call reads its result.

        The model's own loss is that of ``labels`` in `input_kwargs`, of a model whose module has an `own_loss`, as
        rows of Hugging Face models have. Each microbatch then counts by its labels, so the loss and gradients are
        those of the batch in one piece. Outputs with a `loss` but without `own_loss` are taken in one microbatch
        only. If there is a `loss_fn`, it decides, and labels in `input_kwargs` are an argument like others.

        Returns the sum of the losses over the microbatches, 0-dim on the host, or a list of such sums. Gradients
        accumulate until a step function or `zero_grad` drops them.

        A call that fails while its optimizer steps may leave some layers stepped and others not. With
        ``master="split"`` the weights are then torn, and calls are refused until a state is loaded; otherwise
        `reset` goes back to the weights before the call, though not to the optimizer's state.

        Raises `ValueError` for a `label` without a `loss_fn`, for an `optimizer` without ``step_in_backward``, for
        ``step_in_backward`` without an `optimizer`, and for an optimizer that leaves trained parameters out;
        `TypeError` for another kind of optimizer; `RuntimeError` while torch's grad mode is off; what a layer or
        `loss_fn` raises, with a note that names the layer and the microbatch.
        """
        with self._engine.telling():
            _check_arguments(input_args, input_kwargs, loss_fn)
            self._refuse_call(input_kwargs or {})
            config = _training_config(given("run_config", run_config).over(self.model_run_config))
            chosen = call_loss(self.model, input_kwargs or {}, label, loss_fn, config.split_label)
            arrivals = Arrivals(self.runtime.backend, (input_args, chosen.kwargs, label))
            parts = self._split(input_args, chosen.kwargs, arrivals, config, "fused")
            labels, loss_fn = chosen.in_parts(parts)
            step = self._step_during(optimizer)
        losses, outputs = self._engine.forward_backward(
            parts, labels, arrivals, loss_fn, config, keep=return_outputs, step=step
        )
        if not return_outputs:
            return losses
        merged = self._merge(outputs, parts, config)
        return losses, with_loss(merged, losses) if chosen.is_own else merged

    def _step_during(self, optimizer: torch.optim.Optimizer | None) -> StepDuring | None:
        """Return the step of this optimizer in the next call; None if gradients are kept, or are of inputs alone.

        Raises `ValueError` if there is an optimizer but gradients are kept, or the other way round.
        """
        if not self._engine.host.state.options.steps_in_backward:
            if optimizer is not None:
                raise ValueError(
                    f"forward_backward was given an optimizer, but model {self.name!r} keeps its gradients: wrap "
                    "it with step_in_backward=True, or call model.step(...) after forward_backward"
                )
            return None
        if optimizer is None:
            if not self._engine.host.has_trained():
                return None
            raise ValueError(
                f"model {self.name!r} was wrapped with step_in_backward=True, so gradients are consumed as they "
                "arrive and cannot be accumulated: give forward_backward the optimizer that steps, as "
                "forward_backward(..., optimizer=optimizer), or wrap the model without step_in_backward"
            )
        return StepDuring(self._whole, optimizer)

    @property
    def engine(self) -> Engine:
        """The engine that runs the calls; for `AutoRoundPipe` models that contain this one."""
        return self._engine

    @property
    def num_microbatch(self) -> int | None:
        """Microbatches per batch in `model_run_config`; None: chosen at the first call, or devices + 1."""
        count = self.model_run_config.num_microbatch
        return None if count == "auto" else count

    def layer_costs(self, run_type: Mode = "fused") -> list[LayerCost]:
        """Return the planner's cost of each layer: measured in calls of this type, else guessed from sizes."""
        return self._engine.layer_costs(run_type)

    def call_times(self) -> list[CallTime]:
        """Return what the latest plan of each kind of call promises that a call takes, and what calls took.

        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4), runtime=runtime).call_times()
        []

        Promises are simulated when this is called. Calls count once they are over: ask after `synchronize()`.
        """
        return self._engine.call_times()

    def refuse(self, arguments: Mapping[str, str]) -> None:
        """Refuse these keyword arguments of calls from now on; each has the reason."""
        self._own("_refused", dict(arguments))

    def _refuse_call(self, kwargs: Mapping[str, Any]) -> None:
        self._refuse_added()
        self._follow_mode()
        for name in kwargs.keys() & self._refused.keys():
            if kwargs[name] is not None:
                raise ValueError(f"{name} must not be given, but is: {self._refused[name]}")

    def _run(self, parts: rp_batch.Parts[Any], arrivals: Arrivals, config: RoundPipeRunConfig) -> list[Any]:
        wants_grad = torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad
        if wants_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "requires_grad is True, but torch's grad mode is off; call under torch.enable_grad()"
            )
        check_outputs(config)
        return self._engine.forward(parts, arrivals, config, wants_grad=wants_grad)

    def _split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arrivals: Arrivals,
        config: RoundPipeRunConfig,
        mode: Mode = "train",
    ) -> rp_batch.Parts[Any]:
        spec = declared_spec(self.model, kwargs) if config.split_input is None else config.split_input
        count = num_microbatches(self._engine, self.runtime, (args, kwargs), spec, config, mode)
        parts = rp_batch.split((args, kwargs), count, spec)
        arrivals.check(count, parts)
        return parts

    def _merge(self, outputs: Sequence[Any], parts: rp_batch.Parts[Any], config: RoundPipeRunConfig) -> Any:
        if config.merge_output is False:
            return outputs
        return placed(rp_batch.merge(outputs, config.merge_output, sizes=parts.sizes), config)


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, but is {value!r} instead")
    return value


def _check_model(model: nn.Module, pin_model: object, runtime: object, double_buffer: object) -> None:
    for name, wrapper in wrappers(model):
        raise TypeError(
            f"{name!r} in the model is wrapped already, as {wrapper.name!r}; wrap only the whole model, or use "
            "AutoRoundPipe over the parts"
        )
    if pin_model not in get_args(PinMode):
        raise ValueError(f"pin_model must be 'alloc', 'register' or 'off', but is {pin_model!r} instead")
    if double_buffer not in (True, False, None):
        raise ValueError(f"double_buffer must be True, False or None, but is {double_buffer!r} instead")
    if runtime is not None and not isinstance(runtime, Runtime):
        raise TypeError(f"runtime must be a Runtime or None, but is {runtime!r} instead")


def _training_config(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """The settings of a training call, checked."""
    if not torch.is_grad_enabled():
        raise RuntimeError("forward_backward computes gradients, but torch's grad mode is off")
    if config.requires_grad is False:
        raise ValueError("forward_backward computes gradients, but requires_grad is False; call forward instead")
    check_outputs(config)
    return config


def _check_arguments(input_args: object, input_kwargs: object, loss_fn: object) -> None:
    if not isinstance(input_args, tuple):
        raise TypeError(f"input_args must be a tuple, but is a {type(input_args).__name__}; write (x,)")
    if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
        raise TypeError(f"input_kwargs must be a dict, but is a {type(input_kwargs).__name__}; write {{'x': x}}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, but is a {type(loss_fn).__name__} instead")
