"""`RoundPipeTrainer`, and `RoundPipeMixin` for other trainers."""

# `Trainer` is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import roundpipe
import torch
from roundpipe import AutoRoundPipe, RoundPipe, ShortCollections
from torch import nn
from transformers import Trainer

from rp_trainer.huggingface import saved
from rp_trainer.huggingface.fused_head import bind_fused_head, refuse_wrapped
from rp_trainer.huggingface.host_arguments import bound, stay_on_host
from rp_trainer.huggingface.passing_by import refuse_generating, refuse_models
from rp_trainer.huggingface.phases import Phases, TimedPhases
from rp_trainer.huggingface.served import ServedText
from rp_trainer.on_devices import OnDevices
from rp_trainer.one_call import loss_of_step
from rp_trainer.optimizer import SteppedByEngine
from rp_trainer.options import RoundPipeOptions
from rp_trainer.refusals import (
    refuse,
    refuse_clipping,
    refuse_optimizer,
    refuse_other_loss,
    refuse_precision,
    refuse_stepping_after,
    refuse_wrapping,
)

_Base = Trainer if TYPE_CHECKING else object

# RoundPipe's replacements for torch's optimizers. The states of both can be loaded into each other.
_ON_HOST = {
    torch.optim.Adam: roundpipe.optim.Adam,
    torch.optim.AdamW: roundpipe.optim.AdamW,
    torch.optim.SGD: roundpipe.optim.SGD,
}


class RoundPipeMixin(TimedPhases, ServedText, _Base):
    """Makes a trainer whose loss comes from its model run on RoundPipe. Put it before the trainer's class.

    ::

        class SFTTrainer(RoundPipeMixin, trl.SFTTrainer):
            pass

    Args:
        roundpipe: a `RoundPipeOptions`. All other arguments are the trainer's; `model` may be wrapped already.

    `model` stays the user's model, and `model_wrapped` is the `OnDevices` that runs it. Only methods that
    `Trainer` documents or calls for subclasses are overridden. Nothing is patched.

    Raises `ValueError`, which names the argument, for one that cannot work with RoundPipe, and the errors of
    `roundpipe.wrap_model_to_roundpipe`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(RoundPipeMixin):
            raise TypeError(
                f"RoundPipeMixin must come before the trainer's class, but comes after it in {cls.__name__}: "
                f"write class {cls.__name__}(RoundPipeMixin, ...)"
            )

    def __init__(self, *args: Any, roundpipe: RoundPipeOptions | None = None, **kwargs: Any) -> None:
        self._options = roundpipe or RoundPipeOptions()
        self._on_devices: OnDevices | None = None
        self._step_batches: _StepBatches | None = None
        self._collections = ShortCollections()
        self._phases = Phases(self._options.asynchronous)
        refuse_generating(type(self))
        given = bound(super().__init__, args, kwargs)
        if given.get("args") is not None:
            # Do this before TRL loads a model by its name, since it moves the model to Accelerate's device.
            refuse(given["args"], type(self))
            stay_on_host(given["args"])
        self._given_engine, args, kwargs = _unwrapped(given.get("model"), args, kwargs)
        super().__init__(*args, **kwargs)
        refuse_optimizer(self.optimizer)
        refuse_models(self)
        self._wrapped()
        self._refuse_in_backward()
        self._wrap_frozen()
        if self._options.server is not None:
            self._serve(self._options.server, self._wrapped())
        self.add_callback(self._phases)

    def create_accelerator_and_postprocess(self) -> None:
        """Keep Accelerate on the host. `args` may have been created just now by the trainer's class."""
        refuse(self.args, type(self))
        stay_on_host(self.args)
        super().create_accelerator_and_postprocess()
        refuse_precision(self.accelerator.mixed_precision)

    # The model

    def _wrapped(self) -> OnDevices:
        """Return the model on the devices; wrap it on the first call, and again after `model_init`."""
        on_devices, model = self._on_devices, self.model
        assert isinstance(model, nn.Module)
        if on_devices is None or on_devices.engine.named_model is not model:
            on_devices = self._on_devices = self._wrap(model, self._given_engine)
            self._given_engine = None
            self.model_wrapped = on_devices
        return on_devices

    def _wrap(self, model: nn.Module, engine: RoundPipe | AutoRoundPipe | None = None) -> OnDevices:
        if engine is not None:
            refuse_wrapped(engine, model, "model")
        bind_fused_head(model)
        engine = engine or self._options.wrap(model, f"{type(self).__name__}'s {type(model).__name__}")
        return OnDevices(engine, self._autocast_dtype())

    def _autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None

    def _wrap_frozen(self) -> None:
        """Make the reference model of trainers such as DPO's, and reward models, run on the same devices."""
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module):
            self.ref_model = self._frozen(reference, "ref_model")
        functions: object = getattr(self, "reward_funcs", None)
        if isinstance(functions, list):
            # A new list, since the trainer has kept the user's.
            self.reward_funcs = [
                self._frozen(one, f"reward_funcs[{place}]") for place, one in enumerate(functions)
            ]

    def _frozen(self, model: Any, what: str) -> Any:
        """Return a model that runs on the devices and is not trained; other objects are returned as they are."""
        if isinstance(model, RoundPipe | AutoRoundPipe):
            refuse_wrapped(model, model.named_model, what)
            return OnDevices(model, self._autocast_dtype()).eval()
        if not isinstance(model, nn.Module) or isinstance(model, OnDevices):
            return model
        model.requires_grad_(False)
        # With bf16 Accelerate has wrapped forward in its autocast. Undo that, since `OnDevices` has its own.
        if (own := vars(model).pop("_original_forward", None)) is not None:
            vars(model)["forward"] = own
        bind_fused_head(model)
        options = self._options.for_reference(self._wrapped().engine.runtime)
        engine = options.wrap(model, f"{type(self).__name__}'s {what}")
        return OnDevices(engine, self._autocast_dtype()).eval()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: weights stay on the host."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the model whose calls run on the devices. Accelerate prepares only the optimizer."""
        del model, dataloader
        on_devices = self._wrapped()
        if training:
            # A subclass may have created its optimizer without calling `create_optimizer`.
            self.optimizer = self._stepped(self.optimizer)
            self._refuse_in_backward()
            self._steps.forget()
        return on_devices

    def _refuse_in_backward(self) -> None:
        """Refuse settings that need gradients or several calls a step, if the optimizer steps during backward."""
        steps, options = self._wrapped().engine.steps_in_backward, self._options
        refuse_wrapping(steps, is_asked=options.step_in_backward, is_async=options.asynchronous)
        if not steps:
            return
        refuse_clipping(self.args.max_grad_norm)
        if (cause := self._other_loss()) is not None:
            refuse_other_loss(cause)
        own = self._overriding("training_step")[0]
        if own is not RoundPipeMixin and self.args.gradient_accumulation_steps > 1:
            refuse_other_loss(f"gradient_accumulation_steps > 1 and training_step of {_named(own)}")
        if (kind := self._optimizer_kind()) is not None:
            refuse_stepping_after(kind)

    def _optimizer_kind(self) -> type[object] | None:
        """Return the class of the model's optimizer; None if it is unknown before the optimizer is created."""
        # The attribute is None until the trainer creates the optimizer.
        if self.optimizer is not None:  # pyright: ignore[reportUnnecessaryComparison]
            return type(self._steps.shown if _is_stepped(self.optimizer) else self.optimizer)
        if self._overriding("create_optimizer") != [RoundPipeMixin, Trainer]:
            return None
        return (self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model))[0]

    # The optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return RoundPipe's optimizers in place of torch's; both compute the same."""
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return _ON_HOST.get(kind, kind), kwargs

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the trainer's optimizer, and make it train the master weights in the engine's steps."""
        self._wrapped()
        if not _is_stepped(self.optimizer):
            made = super().create_optimizer() if model is None else super().create_optimizer(model)
            self.optimizer = self._stepped(made)
        return self.optimizer

    def _stepped(self, optimizer: Any) -> torch.optim.Optimizer:
        if _is_stepped(optimizer):
            return optimizer
        refuse_optimizer(optimizer)
        on_devices = self._wrapped()
        if on_devices.engine.steps_in_backward:
            refuse_stepping_after(type(optimizer))
        stepped = SteppedByEngine(on_devices.engine, optimizer, asynchronous=self._options.asynchronous)
        on_devices.optimizer = stepped
        return stepped

    @property
    def _steps(self) -> SteppedByEngine:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(inner, SteppedByEngine)
        return inner

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip in the step. `SteppedByEngine.clip_at_next_step` says which step's norm is returned."""
        del model
        return self._steps.clip_at_next_step(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm to report; None before the first asynchronous step is over."""
        del model
        if grad_norm is not None or self.args.max_grad_norm > 0:
            return grad_norm
        return self._steps.clip_at_next_step(float("inf"))

    # Training

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Get the batches of one step, and keep them: the model's own loss is computed for all in one call."""
        if self._step_batches is not None:
            # The step before is done.
            self._collections.note_step()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_batches = _StepBatches(batches)
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward. If the loss is the model's own, one call runs all batches of a step.

        The result is then the sum of all losses for the first batch, and zero for the others. Any other loss is
        computed by `compute_loss` for each batch, and its backward pass goes through the engine.
        """
        with self._phases("train"):
            return self._trained(model, inputs, num_items_in_batch)

    def _trained(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        engine = self._wrapped().engine
        if not isinstance(engine, RoundPipe) or not self._has_own_loss():
            with self._wrapped().in_place_of_model():
                return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        step = self._step_batches
        # The `training_step` of a subclass may change each batch, so use only the current one then.
        is_whole = self._overriding("training_step")[0] is RoundPipeMixin
        batches = step.beginning_with(inputs) if step is not None and is_whole else [inputs]
        if not batches:
            return torch.zeros(())
        if engine.steps_in_backward and len(batches) < self.current_gradient_accumulation_steps:
            refuse_other_loss(f"a batch that get_batch_samples of {type(self).__name__} did not return")
        return self._in_one_call(engine, batches, num_items_in_batch)

    def _has_own_loss(self) -> bool:
        """Return whether the loss is the one that the model returns and is known to divide."""
        return self._other_loss() is None

    def _other_loss(self) -> str | None:
        """Describe what computes a loss other than the model's own, or runs the model itself; None if nothing."""
        plain: list[object] = [RoundPipeMixin, Trainer]
        for method, classes in (
            ("compute_loss", self._overriding("compute_loss")),
            # An override that comes before the mixin's calls the mixin's for each batch, which is fine.
            ("training_step", self._overriding("training_step")[-2:]),
        ):
            if classes != plain:
                return f"{method} of {_named(next(one for one in classes if one not in plain))}"
        if self.compute_loss_func is not None:
            return "compute_loss_func"
        if self.label_smoother is not None:
            return "label_smoothing_factor"
        if getattr(self._wrapped().engine.model, "own_loss", None) is None:
            return f"a {type(self.model).__name__} without a loss that is known to divide"
        return None

    def _overriding(self, method: str) -> list[object]:
        """Return the classes (or the trainer object) that define a method, in the order of calls."""
        return [one for one in (self, *type(self).__mro__) if method in vars(one)]

    def _in_one_call(self, engine: RoundPipe, batches: list[Any], num_items: Any) -> torch.Tensor:
        is_counted = self.model_accepts_loss_kwargs and num_items is not None
        extra = {"num_items_in_batch": num_items} if is_counted else {}
        prepared = [{**self._prepare_inputs(batch), **extra} for batch in batches]
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        is_scaled = is_counted if is_scaled is None else is_scaled
        scale = 1.0 if is_scaled else 1.0 / self.current_gradient_accumulation_steps
        self._wrapped().note_gradients()
        optimizer = self._steps.in_call() if engine.steps_in_backward else None
        with self._wrapped().autocast(), self.compute_loss_context_manager():
            return loss_of_step(engine, prepared, scale, optimizer).float()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate in any way with the result of the last step, which the next call reads, too.

        So with asynchronous steps, too, what the trainer takes for the generating policy's log-probabilities are.
        """
        self._settle()
        if self.model is not None and self.model.training:
            # Texts of an evaluation are not learned.
            self._phases.generated_at(self.state.global_step)
        return super()._generate(*args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare a batch; trainers that generate do so here, and calls of `self.model` run on the devices."""
        with self._wrapped().in_place_of_model():
            return super()._prepare_inputs(inputs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the trainer's loss; calls of `self.model` also run on the devices."""
        with self._wrapped().in_place_of_model():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate and predict with the result of the last step, which calls read from now on."""
        self._settle()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Evaluate a batch. If only the model's own loss is wanted, its logits stay on the devices."""
        # Another class's method may read the logits.
        is_plain = self._overriding("prediction_step")[-2:] == [RoundPipeMixin, Trainer]
        only_loss = prediction_loss_only and is_plain and self._has_own_loss()
        with self._wrapped().giving_only_losses() if only_loss else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _settle(self) -> None:
        self._phases.settled_at(self.state.global_step)
        self._wrapped().engine.sync_optim_param()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Put the result of the last step into the model's own parameters at the end."""
        self._settle()
        return super()._finalize_training(*args, **kwargs)

    # Saving and loading

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. ``resume_from_checkpoint=True`` resumes from the newest finished checkpoint."""
        if resume_from_checkpoint is True:
            # Without one, Trainer raises the error.
            resume_from_checkpoint = saved.newest(str(self.args.output_dir)) or True
        self._step_batches = None
        if self._served is not None:
            self._served.sender.forget()
        with self._collections:
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `save_pretrained` does; in a checkpoint with everything needed to resume training."""
        is_checkpoint = _internal_call and self.is_in_train and not self.args.save_only_model
        if output_dir is None or not is_checkpoint:
            super().save_model(output_dir, _internal_call)
            return
        engine = self._wrapped().engine
        saved.save(output_dir, engine, self._steps, self.lr_scheduler, self.state.global_step)
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: `save_model` has saved them."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a plain Trainer's checkpoint. Those of RoundPipe's are loaded with the optimizer."""
        if not saved.is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load everything needed to resume training."""
        # Trainer finds no optimizer of its own in RoundPipe's checkpoints; a subclass may load more from them.
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and saved.is_ours(checkpoint):
            saved.load(checkpoint, self._wrapped().engine, self._steps, self.lr_scheduler)

    def _load_best_model(self) -> None:
        self._settle()
        super()._load_best_model()


class RoundPipeTrainer(RoundPipeMixin, Trainer):
    """`transformers.Trainer` on RoundPipe: weights and optimizer on the host, layers on all GPUs in turn.

    ::

        from rp_trainer import RoundPipeTrainer as Trainer

    See `RoundPipeMixin` for its additional argument, `roundpipe`.
    """


def _is_stepped(optimizer: Any) -> bool:
    # Accelerate has wrapped the optimizer if `train` was called before.
    return isinstance(getattr(optimizer, "optimizer", optimizer), SteppedByEngine)


def _named(owner: object) -> str:
    """Return a class's name, or that of a trainer object's class."""
    return owner.__name__ if isinstance(owner, type) else f"this {type(owner).__name__}"


class _StepBatches:
    """The batches of one step, which all run when the first one comes."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def beginning_with(self, inputs: Any) -> list[Any]:
        """Return all batches for the step's first, none for its others; only `inputs` if it is not of the step."""
        if self._batches and inputs is self._batches[0]:
            return self._batches
        return [] if any(inputs is one for one in self._batches) else [inputs]


def _unwrapped(
    model: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[RoundPipe | AutoRoundPipe | None, tuple[Any, ...], dict[str, Any]]:
    """Return a wrapped model (or None), and the trainer's arguments with the user's model in its place."""
    if not isinstance(model, RoundPipe | AutoRoundPipe):
        return None, args, dict(kwargs)
    own = model.named_model
    return (
        model,
        tuple(own if one is model else one for one in args),
        {name: own if one is model else one for name, one in kwargs.items()},
    )
