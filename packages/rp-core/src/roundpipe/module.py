"""RoundPipe: a model whose layers stream through the devices."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import rp_batch
import rp_sched
import torch
from rp_sched import LayerCost, Limits, Mode, Plan, Task
from torch import nn

from roundpipe.autograd import Gradients, connect
from roundpipe.call import Autocast, Call, LossFn
from roundpipe.config import RoundPipeRunConfig
from roundpipe.context import doing_optimizer
from roundpipe.errors import GradientsIncomplete, Stale, StepFailed
from roundpipe.exposure import Exposure
from roundpipe.randomness import Randomness, draw_seed
from roundpipe.run import Run, sum_losses
from roundpipe.runtime import Runtime, default_runtime
from roundpipe.saved import Packet
from roundpipe.state import LayerState, ModelState, PinMode
from roundpipe.twin import Twins
from roundpipe.update import Updates

# The share of a device's memory that weights and gradients may take; the rest is for activations.
_MODEL_SHARE = 0.6


def _loss_is_output(outputs: Any, labels: Any) -> Any:
    del labels
    return outputs


def _caller() -> str:
    here = str(Path(__file__).parent)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(here):
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
        self._state = ModelState(self.runtime.backend, layers, pin_model, optim_dtype)
        self._twins = self._new_twins()
        self._updates = Updates(self.name, self._state, self.runtime)
        self._exposure = Exposure()
        self._runs: list[Run] = []
        self._plans: dict[tuple[Mode, int], Plan] = {}
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
        with self.runtime.launching():
            self._ready(training=False)
            parts = self._split(args, kwargs, config)
            with_grad = wants_grad and self._anything_requires_grad(parts)
            packets, backward, inputs = self._forward(parts, config, with_grad=with_grad)
        outputs = connect(packets, inputs, backward) if with_grad else [packet.tree() for packet in packets]
        return self._merge(outputs, parts, config)

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

        Returns the sum of the losses over the microbatches, 0-dim on the host, or a list of such sums. Gradients are
        added to those there are, until a step function or `zero_grad` drops them.

        Raises `RuntimeError` while torch's grad mode is off; what a layer or `loss_fn` raises, with a note of where.
        """
        _check_arguments(input_args)
        if not torch.is_grad_enabled():
            raise RuntimeError("forward_backward computes gradients, but torch's grad mode is off")
        config = (run_config or RoundPipeRunConfig()).over(self.model_run_config)
        with self.runtime.launching():
            self._ready(training=True)
            parts = self._split(input_args, dict(input_kwargs or {}), config)
            labels = rp_batch.split(label, len(parts), config.split_label, sizes=parts.sizes, name="label")
            run = self._launch_fused(parts, labels, loss_fn, return_outputs, config)
            losses = run.collect([("loss", 0, m) for m in range(len(parts))])
            last = len(self._state.layers)
            outputs = run.collect([("input", last, m) for m in range(len(parts))]) if return_outputs else []
            inputs = _requiring_grad(parts)
            grads = run.collect([("grad", 0, m) for m in range(len(parts))]) if inputs else []
        if inputs:
            _backpropagate(inputs, _grads_of_inputs(parts, grads))
        total = sum_losses(losses)
        if not return_outputs:
            return total
        return total, self._merge([packet.tree() for packet in outputs], parts, config)

    def step(self, step_fn: Callable[..., object], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run ``step_fn(*args, **kwargs)`` on the optimizer's thread, over the gradients of all calls so far.

        An asynchronous step returns at once, and calls read its result after the next step (or `synchronize`). A
        synchronous one returns when it is done, and calls read its result from now on.

        Raises what a synchronous `step_fn` raises; an asynchronous one's error is raised by the next call.
        """
        if not callable(step_fn):
            raise TypeError(f"step_fn must be callable, but is a {type(step_fn).__name__} instead")
        with self.runtime.launching():
            self._ready(training=True)
            future = self._updates.step(lambda: step_fn(*args, **kwargs), is_async=is_async)
            if not is_async:
                future.exception()
                self._raise_late_errors()

    def synchronize(self) -> None:
        """Wait for everything; afterwards parameters are current and have their gradients in ``.grad``.

        Raises what failed since the last call.
        """
        with self.runtime.launching():
            self._drain()
            self._ready(training=False)
            self._updates.publish()
            self._updates.wait()
            self._raise_late_errors()
            if self._state.broken is None:
                self._exposure.show(self._state.trainable)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients on the host, also those of a call that failed; `set_to_none` changes nothing."""
        del set_to_none
        with self.runtime.launching():
            self._drain()
            self._drop_gradients()

    def reset(self) -> None:
        """Start again from the published weights: drop gradients, and a failed step's half-made update.

        The optimizer's own state, such as moments, is the caller's to reload.
        """
        with self.runtime.launching():
            self._drain()
            self._updates.error()
            self._drop_gradients()
            self._state.failed = None
            self._state.unpublished = False
            self._masters_from_weights(block_tensors(self._state))

    # Parameters

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters to give to an optimizer: one for each trainable parameter, in `optim_dtype`."""
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `optim_parameters`, with the names that ``model.named_parameters()`` gives."""
        self._state.make_masters()
        for name, parameter in self.model.named_parameters(prefix, remove_duplicate=remove_duplicate):
            if parameter.requires_grad:
                yield name, self._state.masters[parameter]

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
        """Load weights; the optimizer's parameters become the loaded ones, and a failed step is forgotten."""
        with self.runtime.launching():
            self._drain()
            self._updates.error()
            self._state.failed = None
            self._state.unpublished = False
            found = super().load_state_dict(state_dict, strict, assign)
            self._refresh()
            self._masters_from_weights(block_tensors(self._state))
        return found

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        del fn, recurse
        raise RuntimeError(
            "a RoundPipe model stays on the host in the dtype it was wrapped in; convert the model before wrapping it"
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

    # Getting ready; under the launch lock

    def _ready(self, *, training: bool) -> None:
        self._raise_late_errors()
        if training:
            self._refuse_half_made()
        self._exposure.take_back()
        self._refresh()
        self._state.note_flags()

    def _refuse_half_made(self) -> None:
        failed, broken = self._state.failed, self._state.broken
        if failed is not None:
            raise StepFailed(
                f"an earlier step of model {self.name!r} failed half-way ({failed!r}); load a state with "
                "load_state_dict() or go back to the last published weights with reset()"
            )
        if broken is not None:
            raise GradientsIncomplete(
                f"an earlier call of model {self.name!r} failed ({broken!r}) and left part of its gradients; "
                "drop them with zero_grad() or reset()"
            )

    def _raise_late_errors(self) -> None:
        over = [run for run in self._runs if run.done()]
        self._runs = [run for run in self._runs if not run.done()]
        error = self._updates.error()
        for run in over:
            run.finish()
        if error is not None:
            raise error

    def _refresh(self) -> None:
        state = self._state
        written = [
            block.tensors[index]
            for block in state.blocks
            if block.kind == "trainable"
            for index in block.changed_outside()
        ]
        if state.changed():
            self._drain()
            written += self._rebuild()
        if written:
            self._updates.wait()
            self._masters_from_weights(written)

    def _rebuild(self) -> list[torch.Tensor]:
        state = self._state
        places = {tensor: tensor.data_ptr() for tensor in block_tensors(state)}
        held = {
            tensor: block.gradient.view(index).clone()
            for block in state.trainable
            if block.gradient is not None
            for index, tensor in enumerate(block.tensors)
            if index in block.gradient.written
        }
        moved = [tensor for tensor, place in places.items() if tensor.data_ptr() != place]
        state.build()
        for block in state.trainable:
            for index, tensor in enumerate(block.tensors):
                if block.gradient is not None and tensor in held:
                    block.gradient.put(index, held[tensor])
        self._twins = self._new_twins()
        self._plans = {}
        return moved

    def _masters_from_weights(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                if tensor in self._state.masters:
                    self._state.masters[tensor].copy_(tensor)

    def _new_twins(self) -> list[Twins]:
        return [Twins(lane.device.torch_device, self._state.layers) for lane in self.runtime.lanes]

    def _drain(self) -> None:
        self._updates.wait()
        for run in self._runs:
            run.wait()
        lines = [block.turns for block in self._state.blocks]
        lines += [block.gradient.turns for block in self._state.trainable if block.gradient is not None]
        for line in lines:
            ticket = line.write()
            ticket.enter()
            ticket.leave()

    def _drop_gradients(self) -> None:
        self._exposure.take_back()
        self._state.broken = None
        for block in self._state.trainable:
            if block.gradient is not None:
                block.gradient.drop()

    # Launching; under the launch lock

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: RoundPipeRunConfig) -> Any:
        count = config.num_microbatch or len(self.runtime.lanes) + 1
        return rp_batch.split((args, kwargs), count, config.split_input)

    def _merge(self, outputs: Sequence[Any], parts: Any, config: RoundPipeRunConfig) -> Any:
        merged = rp_batch.merge(outputs, config.merge_output, sizes=parts.sizes)
        if config.output_device is None:
            return merged
        return rp_batch.map_leaves(
            lambda leaf: leaf.to(config.output_device) if isinstance(leaf, torch.Tensor) else leaf, merged
        )

    def _anything_requires_grad(self, parts: Sequence[Any]) -> bool:
        return bool(self._state.trainable) or bool(_requiring_grad(parts))

    def _call(self, config: RoundPipeRunConfig, *, with_grad: bool, **more: Any) -> Call:
        state = self._state
        random = with_grad or any(flag for flags in state.flags for flag in flags)
        preserve = config.preserve_rng_state is not False
        randomness = Randomness(draw_seed(), state.quiet) if random and preserve else None
        grain = config.recompute_grain or "stage"
        return Call(self.name, state, state.flags, with_grad, grain, randomness, Autocast.current(), **more)

    def _launch_fused(
        self, parts: Any, labels: Any, loss_fn: LossFn, return_outputs: bool, config: RoundPipeRunConfig
    ) -> Run:
        call = self._call(config, with_grad=True, loss_fn=loss_fn, keep_outputs=return_outputs)
        run = Run(call, self.runtime, self._twins)
        tasks = self._tasks(config, "fused", len(parts), input_grads=bool(_requiring_grad(parts)))
        run.expect(tasks)
        if return_outputs:
            _reserve(run, "input", len(self._state.layers), len(parts))
        if _requiring_grad(parts):
            _reserve(run, "grad", 0, len(parts))
        self._fill_inputs(run, parts, with_grad=True)
        for m, part in enumerate(labels):
            run.put(("label", 0, m), Packet.of(self.runtime.backend, part, with_grads=False))
        self._runs.append(run)
        run.launch(tasks)
        return run

    def _forward(
        self, parts: Any, config: RoundPipeRunConfig, *, with_grad: bool
    ) -> tuple[list[Packet], Callable[[Gradients], Gradients], list[torch.Tensor]]:
        run = Run(self._call(config, with_grad=with_grad), self.runtime, self._twins)
        inputs = _requiring_grad(parts) if with_grad else []
        tasks = self._tasks(config, "train" if with_grad else "infer", len(parts), input_grads=bool(inputs))
        forward = [task for task in tasks if task.kind == "F"]
        backward = [task for task in tasks if task.kind == "B"]
        run.expect(tasks)
        _reserve(run, "input", len(self._state.layers), len(parts))
        if inputs:
            _reserve(run, "grad", 0, len(parts))
        self._fill_inputs(run, parts, with_grad=with_grad)
        run.launch(forward)
        packets = run.collect([("input", len(self._state.layers), m) for m in range(len(parts))])
        run.settle()
        version = self._state.version

        def run_backward(grads: Gradients) -> Gradients:
            with self.runtime.launching():
                self._ready(training=True)
                self._check_version(version)
                self._launch_backward(run, backward, packets, grads)
                returned = run.collect([("grad", 0, m) for m in range(len(parts))]) if inputs else []
                run.finish()
            return _grads_of_inputs(parts, returned) if inputs else []

        return packets, run_backward, inputs

    def _check_version(self, version: int) -> None:
        if version != self._state.version:
            raise Stale(
                f"model {self.name!r}: newer weights were published since this forward, so its backward would mix "
                "two versions; call backward() before the next step, or use forward_backward()"
            )

    def _launch_backward(
        self, run: Run, tasks: Sequence[Task], packets: Sequence[Packet], grads: Gradients
    ) -> None:
        run.begin_backward()
        last = len(self._state.layers)
        remaining = iter(grads)
        for m, packet in enumerate(packets):
            found = [next(remaining) if grad else None for grad in packet.grads]
            if run.wants_grad(last, m):
                run.put(("grad", last, m), Packet.of(self.runtime.backend, found, with_grads=False))
        self._runs.append(run)
        run.launch(tasks)

    def _fill_inputs(self, run: Run, parts: Any, *, with_grad: bool) -> None:
        for m, part in enumerate(parts):
            run.put(("input", 0, m), Packet.of(self.runtime.backend, tuple(part), with_grads=with_grad))

    def _tasks(
        self, config: RoundPipeRunConfig, mode: Mode, microbatches: int, *, input_grads: bool
    ) -> list[Task]:
        plan = self._plan(config, mode, microbatches)
        count = len(self.runtime.lanes)
        tasks = rp_sched.order(
            plan, mode=mode, devices=count, microbatches=microbatches, first_device=self.runtime.next_device
        )
        self.runtime.next_device = (tasks[-1].device + 1) % count
        # Below the lowest layer that is trained there is nothing to propagate to.
        lowest = 0 if input_grads else self._state.first_trainable()
        return [task for task in tasks if task.kind != "B" or task.layers.stop > lowest]

    def _plan(self, config: RoundPipeRunConfig, mode: Mode, microbatches: int) -> Plan:
        if config.execute_plan is not None:
            plan = _unfused(config.execute_plan, mode)
            plan.check(len(self._state.layers), mode)
            plan.check_microbatches(microbatches)
            return plan
        if (mode, microbatches) not in self._plans:
            self._plans[mode, microbatches] = self._make_plan(mode, microbatches)
        return self._plans[mode, microbatches]

    def _make_plan(self, mode: Mode, microbatches: int) -> Plan:
        total = min(use.total_bytes for use in self.runtime.memory())
        return rp_sched.plan(
            [_guessed_cost(layer) for layer in self._state.layers],
            devices=len(self.runtime.lanes),
            microbatches=microbatches,
            mode=mode,
            limits=Limits(device_memory_bytes=int(total * _MODEL_SHARE)),
        )


def block_tensors(state: ModelState) -> list[torch.Tensor]:
    """All trainable parameters of a model."""
    return [tensor for block in state.trainable for tensor in block.tensors]


def _unfused(plan: Plan, mode: Mode) -> Plan:
    # A plan for training calls also says how other calls are cut: its fused stage is one more stage there.
    if mode == "fused" or plan.fused is None:
        return plan
    backward = (plan.fused, *plan.backward) if mode == "train" else ()
    return Plan((*plan.forward, plan.fused), None, backward)


def _guessed_cost(layer: LayerState) -> LayerCost:
    # Time in proportion to the weights that are multiplied; only the proportions matter.
    nbytes = layer.nbytes()
    return LayerCost(1e-6 * (nbytes + 1), weight_bytes=nbytes, trainable_bytes=layer.nbytes("trainable"))


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


def _check_arguments(input_args: object) -> None:
    if not isinstance(input_args, tuple):
        raise TypeError(f"input_args must be a tuple, but is a {type(input_args).__name__}; write (x,)")


def _requiring_grad(parts: Sequence[Any]) -> list[torch.Tensor]:
    return [
        leaf
        for part in parts
        for leaf in rp_batch.flatten(tuple(part))[0]
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _reserve(run: Run, kind: Literal["input", "grad"], boundary: int, microbatches: int) -> None:
    for m in range(microbatches):
        run.reserve((kind, boundary, m))


def _grads_of_inputs(parts: Sequence[Any], packets: Sequence[Packet]) -> list[torch.Tensor | None]:
    return [
        grad
        for part, packet in zip(parts, packets, strict=True)
        for leaf, grad in zip(rp_batch.flatten(tuple(part))[0], packet.leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _backpropagate(inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    pairs = [(tensor, grad) for tensor, grad in zip(inputs, grads, strict=True) if grad is not None]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
