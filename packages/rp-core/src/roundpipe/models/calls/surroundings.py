"""What a call must not be surrounded by, or be given: transforms, modes and tensors that do not reach devices."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import rp_batch
import torch
from rp_engine.errors import RoundPipeError, TrainingWarning
from rp_engine.wrapping import is_in_level
from rp_errors import warn_user
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage] - no public way to see them
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage] - no public way to see them
)
from torch.utils.flop_counter import (
    _FlopCounterMode,  # pyright: ignore[reportPrivateUsage] - what `FlopCounterMode` enters
)


def check_call(model: nn.Module, name: str, **trees: Any) -> None:
    """Refuse a call that surroundings do not reach, and odd tensors; warn of modes that see nothing.

    `trees`: what the call is given, by the names that errors begin with.

    Raises `RoundPipeError` inside a transform of ``torch.func`` or a forward-mode level, under ``FakeTensorMode``,
    while ``torch.jit`` traces, and in the training forward of ``DistributedDataParallel``; `TypeError` for
    nested, sparse, quantized and meta tensors.
    """
    refuse_around(name)
    _look_at_modes(model, name)
    for root, tree in trees.items():
        for place, leaf in enumerate(rp_batch.flatten(tree)[0]):
            if isinstance(leaf, torch.Tensor) and (kind := odd(leaf)) is not None:
                where = f"{root}{rp_batch.paths(tree)[place]}"
                raise TypeError(
                    f"model {name!r} was given a {kind[0]} as {where}, which cannot go to devices; {kind[1]}"
                )


def tell_no_cache(
    model: nn.Module, name: str, named: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Warn, once a model, if a call of a row of a Hugging Face model asks for a cache, which rows never make.

    `named`: the user's own model, whose forward tells the names of `args`. A configuration's `use_cache` is True
    by default in transformers, so it says nothing of what the user wants.
    """
    given = kwargs.get("use_cache")
    if any(arg is True for arg in args):
        parameters = list(inspect.signature(named.forward).parameters)
        given = dict(zip(parameters, args, strict=False)).get("use_cache", given)
    told = _TOLD.setdefault(model, set())
    if given is True and "use_cache" not in told:
        told.add("use_cache")
        warn_user(
            f"model {name!r} was called with use_cache=True, which changes nothing: it would return a "
            "key-value cache (past_key_values), but a row of layers on devices makes none. Leave it out, or give "
            "one without gradients, as `generate` does by itself",
            TrainingWarning,
        )


def odd(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return what a tensor is, in words, if no device can have it, and what to do; None for an ordinary one.

    >>> odd(torch.eye(2).to_sparse())
    ('sparse tensor (torch.sparse_coo)', 'convert it with to_dense()')
    >>> odd(torch.eye(2)) is None
    True
    """
    if tensor.is_nested:
        return "nested tensor", "pad it with to_padded_tensor(...), and give lengths or a mask beside it"
    if tensor.layout != torch.strided:
        return f"sparse tensor ({tensor.layout})", "convert it with to_dense()"
    if tensor.is_quantized:
        return f"quantized tensor ({tensor.dtype})", "convert it with dequantize()"
    if type(tensor).__name__ == "DTensor":
        return "DTensor", "wrap the model before it is sharded: fully_shard has no place beside RoundPipe"
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return "tensor without values (meta or fake)", "make it on the CPU"
    return None


def refuse_around(name: str) -> None:
    """Raise the `RoundPipeError`s of `check_call`, for what may also surround the module that was taken apart."""
    _refuse_transforms(name)
    _refuse_tracing(name)
    _refuse_replicas(name)
    if any(type(mode).__name__ == "FakeTensorMode" for mode in _get_current_dispatch_mode_stack()):
        raise RoundPipeError(
            f"model {name!r} was called under FakeTensorMode, but its devices compute with values; call the "
            "model that was wrapped, before wrapping it"
        )


def _refuse_transforms(name: str) -> None:
    found: Any = _FUNCTORCH.peek_interpreter_stack()
    kind = None if found is None else str(found.key().name)
    what = None if kind is None else f"torch.func.{_TRANSFORMS.get(kind, 'a transform')}"
    if is_in_level() and kind in (None, "Jvp"):
        what = "forward-mode differentiation (torch.func.jvp, forward_ad.dual_level)"
    if what is not None:
        raise RoundPipeError(
            f"model {name!r} was called inside {what}, which does not reach its devices; call the model outside, "
            "use the transform inside of a layer, or take plain backward()"
        )


def _refuse_tracing(name: str) -> None:
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - there is no public way
        raise RoundPipeError(
            f"model {name!r} was called inside torch.jit.trace, which sees none of its layers; trace the model "
            "that was wrapped, before wrapping it"
        )


def refuse_walks(name: str) -> None:
    """Raise `RoundPipeError` if ``torch.fx``, which traces, or FSDP looks for a model's modules."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - torch has no flag of its own for a thread
    while frame is not None:
        module = frame.f_globals.get("__name__")
        # Not its other functions, by which saving looks for FSDP's modules.
        if module == _FSDP and frame.f_code.co_name == "__init__":
            raise fsdp_error(name)
        if module == "torch.fx._symbolic_trace":
            raise fx_error(name)
        frame = frame.f_back


_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


def fx_error(name: str) -> RoundPipeError:
    """Return the error of a wrapped model that ``torch.fx`` traces.

    >>> fx_error("model")
    RoundPipeError("model 'model', or one around it, is traced by torch.fx, ...")
    """
    return RoundPipeError(
        f"model {name!r}, or one around it, is traced by torch.fx, which sees none of its layers; trace the model "
        "that was wrapped, before wrapping it: what comes out can be wrapped"
    )


def fsdp_error(name: str) -> RoundPipeError:
    """Return the error of a wrapped model whose parameters torch's FSDP would replace.

    >>> fsdp_error("model")
    RoundPipeError("model 'model' is given to torch's FSDP, ..., which would replace ...")
    """
    return RoundPipeError(
        f"model {name!r} is given to torch's FSDP, or one around it is, which would replace the parameters "
        "that its devices read; leave it out: one process drives all GPUs of a machine, and torchrun with a "
        "process a machine joins machines (docs/machines.md)"
    )


def _refuse_replicas(name: str) -> None:
    # Its hooks on parameters would never run, so processes would train apart.
    is_inside = DistributedDataParallel._get_active_ddp_module() is not None  # pyright: ignore
    if is_inside and torch.is_grad_enabled():
        raise RoundPipeError(
            f"model {name!r} was called by DistributedDataParallel, which would not add up the gradients of its "
            "processes; leave it out: one process drives all GPUs of a machine, and torchrun with a process a "
            "machine joins machines (docs/machines.md)"
        )


# Torch has no public way to ask which transforms are active.
_FUNCTORCH: Any = import_module("torch._C._functorch")
_TRANSFORMS = {"Vmap": "vmap", "Grad": "grad, vjp or jacrev", "Jvp": "jvp", "Functionalize": "functionalize"}
# By model: the kinds of modes that were told of.
_TOLD: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _look_at_modes(model: nn.Module, name: str) -> None:
    for mode in _get_current_dispatch_mode_stack():
        kind = "FlopCounterMode" if isinstance(mode, _FlopCounterMode) else type(mode).__name__
        _tell_once(model, name, kind, _OF_MODES)
    for mode in _get_current_function_mode_stack():
        if not isinstance(mode, DeviceContext):
            _tell_once(model, name, type(mode).__name__, _OF_MODES)
        elif mode.device.type != "cpu":
            _tell_once(model, name, f"the default device {mode.device}", _OF_DEFAULT_DEVICES)
    # Not where it sees all threads.
    if torch.autograd._profiler_enabled():  # pyright: ignore - there is no public way
        _tell_once(model, name, "torch's profiler", _OF_PROFILERS)


_OF_MODES = (
    "so it sees, counts and changes none of their operations. Use it around the model that was wrapped, before "
    "wrapping it, or inside of a layer; profile() and call_times() show what devices do"
)
_OF_DEFAULT_DEVICES = "so what they create is on the host. Let layers create tensors with device=x.device"
_OF_PROFILERS = (
    "so it has none of their operations on the host, and record_function spans nothing there. Give it "
    "experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True), or use "
    "roundpipe.profile(), which shows what devices do"
)


def _tell_once(model: nn.Module, name: str, kind: str, consequence: str) -> None:
    told = _TOLD.setdefault(model, set())
    if kind in told:
        return
    told.add(kind)
    warn_user(
        f"model {name!r} was called under {kind}, which sees only this thread: layers run on the threads of their "
        f"devices, {consequence}",
        TrainingWarning,
    )
