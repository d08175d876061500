"""RoundPipe: a model whose weights stay on the host and whose layers run on the devices in turn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, wraps
from inspect import ismethod
from typing import Any, cast

import rp_batch
import torch
from rp_calls import (
    CallSplitter,
    LossArguments,
    LossCall,
    OwnLoss,
    check_outputs,
    choose_loss,
    evaluation_config,
    merged,
    num_microbatches_of_state,
    outputs_are_loss,
    placed,
    training_config,
    with_loss,
)
from rp_engine import (
    Arrivals,
    Engine,
    LossFn,
    RoundPipeRunConfig,
    Runtime,
    StepDuring,
    WholeModel,
)
from rp_engine.wrapping import Compute, FrozenDisk, MasterKind, PinMode, check_compute
from rp_optim import Disk
from rp_packing import Fp8
from torch import nn

from roundpipe.models.base import wrappers
from roundpipe.models.calls.cached import CachedCalls, refuse_gradients
from roundpipe.models.calls.on_engine import OnOneEngine
from roundpipe.models.calls.surroundings import check_call, tell_no_cache
from roundpipe.models.calls.untraced import untraced
from roundpipe.models.unfit import refuse_unfit
from roundpipe.models.wrapped.options import WrapOptions, given_config
from roundpipe.models.wrapped.row import row_of


class RoundPipe(OnOneEngine):
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
            ``"disk:DIR[,DIR...]"`` or a `roundpipe.optim.Disk` keeps the remainders on disk, 2 bytes a parameter
            less in memory: steps read and write them (see docs/how-to/disk.md).
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
        compute: how linear layers multiply, unless settings say otherwise: ``"bf16"``, the default, or ``"fp8"``,
            which is up to twice as fast on GPUs that have it, for one more rounding of each factor. An
            `Fp8` says which products and which layers; docs/how-to/fp8.md says what it does to numbers.
            ``"auto"``: the first training call measures which of them is faster on its device, and all calls from
            then on compute so, those of a training that is resumed from its checkpoints, too. ``"fp16-sums"``:
            fp16 weights with sums in fp16, twice as fast on GeForce cards, which torch sets for the whole process.
        frozen: where frozen weights are: ``"memory"``, or ``"disk:DIR[,DIR...]"``: in files without names in
            these directories, from where each upload reads them through a small pinned ring. They are written
            once, here, layer by layer; with one directory, those in files on the same disk, such as a
            checkpoint's that is mapped, are left there. What reads them on the host has them mapped.
            docs/how-to/disk.md says more.

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

    A batch is split along the first dimension of its tensors if outputs show that this is right: the first call of
    a kind runs a few rows whole and split, without gradients. Where they differ, it runs in one piece, with a
    `TrainingWarning`. `split_input` of the settings says how else to split, without a trial.

    Raises `ValueError` or `TypeError` for an unsupported model or an invalid setting.
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
        compile_layers: bool | Mapping[str, Any] = False,
        double_buffer: bool | None = None,
        master: MasterKind | str | Disk = "whole",
        step_in_backward: bool = False,
        compute: Compute | Fp8 | None = None,
        frozen: str | FrozenDisk = "memory",
    ) -> None:
        options = WrapOptions(
            optim_dtype=optim_dtype,
            model_run_config=model_run_config,
            pin_model=pin_model,
            runtime=runtime,
            compile_layers=compile_layers,
            double_buffer=double_buffer,
            master=master,
            step_in_backward=step_in_backward,
            compute=compute,
            frozen=frozen,
        )
        _check_model(model)
        super().__init__(model, name, options.host.optim_dtype)
        self._own("_refused", {})
        self._own("model_run_config", options.run_config)
        self._own("runtime", options.devices())
        self._check_compute(model)
        engine = Engine(
            self.name, partial(row_of, model), self.runtime, options.host, compile_layers=compile_layers
        )
        self._own("_engine", engine)
        self._own("_splitter", CallSplitter(self.name, model, engine, self.runtime))
        self._own("_cached", CachedCalls(model, engine, self.runtime))
        self._own("_whole", WholeModel(self.name, [engine.host], self.runtime))
        self._keep_current(model)

    def _check_compute(self, model: nn.Module) -> None:
        check_compute(self.name, row_of(model), self.runtime, self.model_run_config.compute)

    _refused: dict[str, str]
    _splitter: CallSplitter
    _cached: CachedCalls

    # Calls

    @untraced
    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """Run the wrapped model; its outputs are on the host by default, and backward works through them.

        Outputs with a loss have that of the whole batch, as in `forward_backward`. In microbatches
        (``merge_output=False``) each has its own.

        Raises `RuntimeError` if gradients are requested while torch's grad mode is off; `ValueError` for a loss of
        several microbatches, if it is unknown what each contributes; and what a layer raises.

        A row of a Hugging Face model takes a key-value cache (`past_key_values`, given by name) without gradients.
        Such a call runs in one microbatch, whatever the model's settings are, or in as many as its own
        `roundpipe_run_config` says, and its output is that of the batch. A cache that was used in several
        microbatches goes on in these. Each layer's keys and values stay on the device where the layer runs: the
        first, if it has room for all weights, or one of several that share them.
        """
        own_config = given_config("roundpipe_run_config", roundpipe_run_config)
        config = own_config.over(self.model_run_config)
        if self._cached.is_one(kwargs):
            return self._forward_with_cache(args, kwargs, config, num_microbatches_of_state(own_config))
        with self._engine.telling_forward(config, (args, kwargs)):
            check_call(self, self.name, args=args, kwargs=kwargs)
            self._tell_no_cache(args, kwargs)
            self._refuse_call(kwargs)
            stays_split = config.merge_output is False
            chosen = None if stays_split else choose_loss(self.model, kwargs, None, outputs_are_loss, None)
            kwargs = kwargs if chosen is None else dict(chosen.kwargs)
            arrivals = Arrivals(self.runtime.backend, (args, kwargs))
            parts = self._splitter.split(args, kwargs, arrivals, config)
        outputs = self._run(parts, arrivals, config)
        if chosen is None:
            return outputs
        loss = placed(chosen.loss_of(parts, outputs), config)
        return with_loss(merged(outputs, parts, config, self.model), loss)

    def _forward_with_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: RoundPipeRunConfig, count: int
    ) -> Any:
        refuse_gradients(config)
        check_call(self, self.name, args=args, kwargs=kwargs)
        self._refuse_call(kwargs)
        return self._cached.forward(args, kwargs, config, count, for_loop=self._under_way == "generate")

    def _passed_on(self, name: str, found: Any) -> Any:
        if name == "generate" and ismethod(found) and self._cached.arguments:
            return wraps(found)(partial(self._generate, cast("nn.Module", found.__self__)))
        return super()._passed_on(name, found)

    def _generate(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` of the user's own model on the devices, with the results of all steps so far."""
        self._refuse_call(kwargs)
        self.synchronize()
        before = self._under_way
        self._own("_under_way", "generate")
        try:
            return self._cached.generate(model, self, args, kwargs)
        finally:
            self._own("_under_way", before)

    @untraced
    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | OwnLoss = outputs_are_loss,
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
                batch. Default: the model's own loss, or else the outputs are the loss. An `OwnLoss` takes the
                place of the model's.
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
            asked = self._checked(LossArguments.checked(input_args, input_kwargs, label, loss_fn))
            config = training_config(given_config("run_config", run_config).over(self.model_run_config))
            call = LossCall.split(self._splitter, asked, config, "fused", returns=return_outputs)
            step = StepDuring.wanted(self._whole, optimizer)
        losses, outputs = self._engine.forward_backward(
            call.parts, call.labels, call.arrivals, call.loss_fn, config, keep=return_outputs, step=step
        )
        call.tell()
        return call.with_outputs(losses, outputs, self.model) if return_outputs else losses

    @untraced
    def loss(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | OwnLoss = outputs_are_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Any:
        """Compute the loss that `forward_backward` would return, without gradients; as fast as a forward.

        Args:
            input_args, input_kwargs, label, loss_fn, return_outputs, run_config: as in `forward_backward`.

        >>> def squares(outputs, label):
        ...     return (outputs - label).square().sum()
        >>> with Runtime("cpu:2") as runtime:
        ...     model = RoundPipe(nn.Linear(4, 1), runtime=runtime).eval()
        ...     model.loss((torch.ones(6, 4),), label=torch.ones(6, 1), loss_fn=squares).shape
        torch.Size([])

        Nothing is kept or recomputed for a backward, and the last layer's outputs, such as logits, leave the
        device with ``return_outputs=True`` only. Gradients, `.grad`, masters and steps are not touched, a forward
        made before may still run its backward, and models without trainable parameters are fine. Also under
        `torch.no_grad()` and `torch.inference_mode()`.

        The layers run under `torch.no_grad()` with the training flags that they have: call `eval()` for an
        evaluation. If any module is in training mode, the call draws a seed from the caller's generator, as
        `forward_backward` does, so dropout drops the same. In evaluation mode the call draws nothing, unless a
        layer draws all the same.

        Returns the sum of the losses over the microbatches, 0-dim on the host, or a list of such sums: on the same
        weights, flags and seeds, the number that `forward_backward` returns with as many microbatches, to the bit,
        unless a module does something else under `torch.no_grad()`, as the fast path of torch's
        `nn.TransformerEncoder` does. Several machines divide the microbatches, as in `forward_backward`: all of
        them call it with the same batch, and all get the loss of the whole.

        Raises what `forward_backward` raises about its arguments, layers and `loss_fn`, and `ValueError` for a
        `run_config` with ``requires_grad=True``.
        """
        with self._engine.telling_loss():
            asked = self._checked(LossArguments.checked(input_args, input_kwargs, label, loss_fn))
            config = evaluation_config(given_config("run_config", run_config)).over(self.model_run_config)
            check_outputs(config)
            call = LossCall.split(self._splitter, asked, config, "infer", returns=return_outputs)
        losses, outputs = self._engine.loss(
            call.parts, call.labels, call.arrivals, call.loss_fn, config, keep=return_outputs
        )
        call.tell()
        return call.with_outputs(losses, outputs, self.model) if return_outputs else losses

    def _checked(self, asked: LossArguments) -> LossArguments:
        check_call(self, self.name, input_args=asked.args, input_kwargs=asked.kwargs, label=asked.label)
        self._tell_no_cache(asked.args, asked.kwargs)
        self._refuse_call(asked.kwargs)
        return asked

    def refuse(self, arguments: Mapping[str, str]) -> None:
        """Refuse these keyword arguments of calls from now on; each has the reason."""
        self._own("_refused", dict(arguments))

    def _tell_no_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Rows of Hugging Face models have it; other layers may take an argument of that name.
        if hasattr(self.model, "own_loss"):
            tell_no_cache(self, self.name, self.named_model, args, kwargs)

    def _refuse_call(self, kwargs: Mapping[str, Any]) -> None:
        self._refuse_added()
        self._narrow.follow(self)
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


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users need not check types
        raise TypeError(f"model must be an nn.Module, but is a {type(model).__name__} instead")
    refuse_unfit(model)
    for name, wrapper in wrappers(model):
        if not name:
            raise TypeError(f"model is wrapped already, as {wrapper.name!r}; use it as it is")
        raise TypeError(
            f"{name!r} in the model is wrapped already, as {wrapper.name!r}; wrap only the whole model, or use "
            "AutoRoundPipe over the parts"
        )
