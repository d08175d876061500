"""`wrap_model_to_roundpipe`: wraps any model, by a preset, as a sequence of layers, or submodule by submodule."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rp_engine import RoundPipeRunConfig, Runtime
from rp_engine.estimates import HostMemoryCheck
from rp_engine.wrapping import Compute, FrozenDisk, MasterKind, PinMode, check_compute, register_lazy_hooks
from rp_optim import Disk
from rp_packing import Fp8
from rp_stand_in import narrowed
from rp_transfer import MappedFiles, group
from torch import nn

from roundpipe.models.adapters import PER_CALL, adds_to_outputs, base_of
from roundpipe.models.auto import AutoRoundPipe, needs_row_error
from roundpipe.models.base import wrappers
from roundpipe.models.partition import Rules, Splitter, flat_row, module_bytes
from roundpipe.models.presets import row_of_preset
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.unfit import refuse_unfit
from roundpipe.models.wrapped.call_site import caller
from roundpipe.models.wrapped.foreign import check_not_packed_by_others
from roundpipe.models.wrapped.options import WrapOptions, given_config


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Container[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig | None = None,
    name: str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    *,
    optim_dtype: torch.dtype | None = None,
    pin_model: PinMode = "alloc",
    runtime: Runtime | None = None,
    compile_layers: bool | Mapping[str, Any] = False,
    double_buffer: bool | None = None,
    master: MasterKind | str | Disk = "whole",
    step_in_backward: bool = False,
    compute: Compute | Fp8 | None = None,
    frozen: str | FrozenDisk = "memory",
    adapter_dtype: torch.dtype | None = None,
) -> RoundPipe | AutoRoundPipe:
    """Wrap a model; a Hugging Face model with a preset becomes a sequence of layers that share its parameters.

    Args:
        model: the model, on the CPU.
        use_sequential_preset: True requires a preset, False uses none, None uses one if it exists.
        lower_threshold: bytes of parameters and buffers below which a submodule is left on the host.
        upper_threshold: bytes up to which a submodule is wrapped whole; default: the size of the model divided by
            the number of devices + 1.
        skip_modules: submodules that are left on the host.
        override_config: settings by submodule, over `model_run_config`.
        model_run_config, name, optim_dtype, pin_model, runtime, compile_layers, double_buffer: for `RoundPipe`.
        master, step_in_backward, compute, frozen: for `RoundPipe`. Parameters outside all wrapped submodules keep
            whole masters, and are in memory.
        adapter_dtype: dtype in which the devices have the trained parameters of a PEFT model, which PEFT makes in
            fp32 whatever the base is; default: as they are. In bf16 their products are as fast as the base's. The
            optimizer's masters start from the unrounded values and are fp32, unless `optim_dtype` says otherwise,
            and so are the adapters that are saved.
        example_inputs: arguments of the model's forward to observe it with, for models that are not observed with
            a few tokens, such as vision-language models.

    An ``nn.Sequential`` is wrapped as a sequence of layers; nested ones larger than `upper_threshold` contribute
    their own layers. In any other model without a preset, `RoundPipe` models run its submodules: these stay where
    they are, but calling one, also *in the model's own forward*, runs it on the devices. The result is an
    `AutoRoundPipe`, which is slower and has no `forward_backward`. If no submodule is run so or skipped, the model
    is wrapped as a single layer.

    A PEFT model becomes the row of the model in it, whose modules hold the adapters; names stay those of the PEFT
    model. The attributes of `model` stay accessible on the result.

    >>> from roundpipe import Runtime
    >>> with Runtime("cpu") as runtime:
    ...     len(wrap_model_to_roundpipe(nn.Sequential(nn.Linear(2, 2)), runtime=runtime).model)
    1

    Raises `NotImplementedError` if `use_sequential_preset` is True and no preset supports the model; `ValueError`
    or `TypeError` for an unsupported model or an invalid argument; `ImportError` for a model of transformers if
    rp-presets is not installed and `use_sequential_preset` is not False. The model is then unchanged.
    """
    _check(model, use_sequential_preset, lower_threshold, upper_threshold, skip_modules)
    check_not_packed_by_others(model)
    name = caller() if name is None else name
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
        # One object, so that all parts share its files.
        frozen=FrozenDisk.of(frozen) or "memory",
    )
    rules = Rules(
        lower_threshold, _upper(model, upper_threshold, options), skip_modules, _configs(override_config)
    )
    with narrowed(model, adapter_dtype, options.devices()) as narrow:
        options = replace(options, optim_dtype=narrow.master_dtype(optim_dtype))
        wrapped = _wrapped(model, name, use_sequential_preset, example_inputs, rules, options)
        wrapped.set_narrow_adapters(narrow)
    return wrapped


def _wrapped(
    model: nn.Module,
    name: str,
    use_sequential_preset: bool | None,
    example_inputs: Mapping[str, Any] | None,
    rules: Rules,
    options: WrapOptions,
) -> RoundPipe | AutoRoundPipe:
    base, required = base_of(model), use_sequential_preset is True
    if required and adds_to_outputs(model):
        raise NotImplementedError(
            f"use_sequential_preset=True asks for a row of layers, but the {type(model.base_model).__name__} of "
            "this PEFT model adds to what the base model returns, which a row would leave out; leave it away"
        )
    is_row = use_sequential_preset is not False and not adds_to_outputs(model)
    row = row_of_preset(base, example_inputs, required=required) if is_row else None
    if row is None and isinstance(model, nn.Sequential):
        row = flat_row(model, rules.upper_bytes)
    if row is None:
        return _taken_apart(model, name, rules, options)
    wrapped = _whole(row, model, name, rules, options)
    if row is not model:
        wrapped.set_original_model(model)
    if base is not model:
        wrapped.refuse(PER_CALL)
    return wrapped


def _whole(row: nn.Module, model: nn.Module, name: str, rules: Rules, options: WrapOptions) -> RoundPipe:
    _check_used(rules, (model,))
    return RoundPipe(row, name=name, **options.under(rules.override.get(model)).arguments())


def _taken_apart(model: nn.Module, name: str, rules: Rules, options: WrapOptions) -> RoundPipe | AutoRoundPipe:
    register_lazy_hooks(model)
    splitter = Splitter(model, name, rules, options)
    if options.step_in_backward and splitter.wrapped:
        raise needs_row_error(name)
    if splitter.wrapped:
        check_compute(name, splitter.wrapped, options.devices(), options.run_config.compute)
    _check_memory(splitter.wrapped, name, options)
    try:
        splitter.split()
        if not splitter.wrapped and not any(module in rules.skip for module in model.modules()):
            return _whole(model, model, name, rules, options)
        _check_used(rules, splitter.wrapped)
        return AutoRoundPipe(model, name, options.host.optim_dtype, runtime=options.runtime)
    except BaseException:
        splitter.undo()
        raise


def _check_memory(parts: Sequence[nn.Module], name: str, options: WrapOptions) -> None:
    """Check that the weights of all parts fit together, and their training: each part checks only its own."""
    HostMemoryCheck(name, options.devices()).check_wrapping(
        group(parts),
        MappedFiles.now(),
        options=options.host,
        in_training_mode=any(part.training for part in parts),
        coded=options.host.coded(parts),
    )


def _upper(model: nn.Module, upper_threshold: int | None, options: WrapOptions) -> int:
    if upper_threshold is not None:
        return upper_threshold
    return module_bytes(model) // (len(options.devices().lanes) + 1)


def _configs(override: Mapping[nn.Module, RoundPipeRunConfig] | None) -> dict[nn.Module, RoundPipeRunConfig]:
    return {module: given_config("override_config", config) for module, config in (override or {}).items()}


def _check_used(rules: Rules, wrapped: tuple[nn.Module, ...]) -> None:
    for module in rules.override:
        if module not in wrapped:
            found = ", ".join(sorted({type(made).__name__ for made in wrapped})) or "nothing"
            raise ValueError(
                f"override_config names a {type(module).__name__} that is not wrapped by itself; wrapped "
                f"modules: {found}. Name one of those, or change the thresholds"
            )


def _check(model: object, preset: object, lower: object, upper: object, skip: Container[nn.Module]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but is a {type(model).__name__} instead")
    for _, wrapper in wrappers(model):
        raise TypeError(f"the model, or a part of it, is wrapped already, as {wrapper.name!r}; wrap it once")
    refuse_unfit(model)
    if preset not in (True, False, None):
        raise ValueError(f"use_sequential_preset must be True, False or None, but is {preset!r} instead")
    for name, value in (("lower_threshold", lower), ("upper_threshold", 0 if upper is None else upper)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be a number of bytes, 0 or more, but is {value!r} instead")
    if model in skip:
        raise ValueError("skip_modules holds the model itself, so nothing is left to wrap; leave it out")
