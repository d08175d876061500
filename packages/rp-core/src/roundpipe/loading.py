"""`from_pretrained`: loads a Hugging Face checkpoint into a model's blocks without having its weights twice."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from rp_engine import Runtime
from rp_engine.errors import HostMemoryWarning
from rp_engine.estimates import HostBytes, MemoryForecast, current_limit
from rp_engine.wrapping import FrozenDisk, FrozenStore
from rp_errors import warn_user
from rp_packing import FORMATS, PackedWeight, as_parameter, format_of, pack_frozen
from rp_transfer import GivingBack, MappedFiles, inner_tensors
from torch import nn

from roundpipe.models.auto import AutoRoundPipe
from roundpipe.models.presets import StoredPacked, presets_for
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.wrap import wrap_model_to_roundpipe
from roundpipe.models.wrapped.call_site import caller

# What `pack` is for a checkpoint that is packed already.
STORED = "stored"


def from_pretrained(
    directory: str | os.PathLike[str],
    model_class: type[Any] | None = None,
    *,
    adapt: Callable[[Any], nn.Module] | None = None,
    pack: str | None = None,
    **options: Any,
) -> RoundPipe | AutoRoundPipe:
    """Load a checkpoint of transformers and wrap it; its weights go from mapped files into the model's blocks.

    Args:
        directory: a local checkpoint of safetensors files, such as one of the hub's cache.
        model_class: a class of transformers; default: ``AutoModelForCausalLM``.
        adapt: called with the loaded model before it is wrapped, such as to add adapters; returns what to wrap.
        pack: freeze the model and hold its matrices in few bits, as `pack_frozen` does: its format, or
            ``"stored"`` to keep those of a checkpoint in FP8, MXFP4, or bitsandbytes' NF4 or int8 as they are.
            Then adapters are trained.
        options: those of `wrap_model_to_roundpipe` and `RoundPipe` are passed to it, all others, such as `dtype`,
            to `model_class.from_pretrained`.

    The result is that of `wrap_model_to_roundpipe` on the model that transformers loads. While it is made, the
    resident memory of the process grows by at most 1.1 times the weights' bytes, if these are 500 MB or more: by
    the blocks, and some 20 MiB of files. Weights that transformers computes, in a cast or by stacking experts, are
    in memory before their block is made, so the largest block of those comes on top. Masters, gradients and a
    second block are made later, for training. With ``frozen="disk:..."`` frozen weights that are in the files as
    they are used stay there, and packed ones go to the disk one after another, so memory holds neither.

    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> from roundpipe import Runtime
    >>> with TemporaryDirectory() as folder, Runtime("cpu:1") as runtime:
    ...     LlamaForCausalLM(config).save_pretrained(folder)
    ...     model = from_pretrained(folder, dtype=torch.bfloat16, optim_dtype=torch.float32, runtime=runtime)
    >>> [type(layer).__name__ for layer in model.model]
    ['Prologue', 'Layer', 'Layer', 'Epilogue']

    A `HostMemoryWarning` tells, before anything is loaded, if the checkpoint's weights do not fit into memory.

    Raises what `rp_presets.load_pretrained`, `rp_presets.load_packed`, `pack_frozen` and `wrap_model_to_roundpipe`
    raise, `ImportError` if rp-presets is not installed, and `TypeError` if `adapt` is not callable or does not
    return a module.
    """
    if adapt is not None and not callable(adapt):
        raise TypeError(f"adapt must be a function of the loaded model, but is {adapt!r} instead")
    if pack is not None and pack not in (*FORMATS, STORED):
        raise ValueError(f"pack must be one of {', '.join((*FORMATS, STORED))}, but is {pack!r}")
    wrapping = {name: options.pop(name) for name in _WRAPPING & options.keys()}
    wrapping.setdefault("name", caller())
    disk = FrozenDisk.of(wrapping.get("frozen", "memory"))
    # One object, so that what is packed meanwhile goes to the files of the model.
    wrapping["frozen"] = disk or "memory"
    if pack is None:
        _warn_if_short(directory, options, wrapping)
    with GivingBack():
        model = _loaded(directory, model_class, pack, options, disk)
        model = model if adapt is None else adapt(model)
    return wrap_model_to_roundpipe(model, **wrapping)


def _loaded(
    directory: str | os.PathLike[str],
    model_class: type[Any] | None,
    pack: str | None,
    options: dict[str, Any],
    disk: FrozenDisk | None,
) -> Any:
    found = presets_for("to load a checkpoint of transformers")
    if pack is None:
        return found.load_pretrained(directory, model_class, **options)
    if pack == STORED:
        return _as_stored(*found.load_packed(directory, model_class, **options))
    model = found.load_pretrained(directory, model_class, **options).requires_grad_(False)
    pack_frozen(model, pack, each=None if disk is None else partial(_to_disk, FrozenStore.on(disk)))
    return model


def _to_disk(store: FrozenStore, weight: PackedWeight) -> None:
    for tensor in inner_tensors(weight):
        store.take_in([tensor], MappedFiles.now())


def _as_stored(model: nn.Module, stored: Mapping[str, StoredPacked]) -> nn.Module:
    model.requires_grad_(False)
    for name, one in stored.items():
        place, _, own = name.rpartition(".")
        like = model.get_parameter(name)
        form = format_of(one.format, transposed=one.format == "mxfp4")
        packed = PackedWeight(form, one.codes, one.scales, like.shape, like.dtype)
        model.get_submodule(place).register_parameter(own, as_parameter(packed))
    return model


def _warn_if_short(
    directory: str | os.PathLike[str], options: Mapping[str, Any], wrapping: Mapping[str, Any]
) -> None:
    """Issue a `HostMemoryWarning` if the files hold more than fits; the model class may not use all of them."""
    known = presets_for("to load a checkpoint of transformers")
    dtype: Any = options.get("dtype", options.get("torch_dtype"))
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    try:
        nbytes = known.checkpoint_bytes(directory, dtype, subfolder=options.get("subfolder") or "")
    except (OSError, ValueError, LookupError, TypeError):
        return  # loading then says what is wrong with the files
    runtime: Runtime | None = wrapping.get("runtime")
    limit = current_limit() if runtime is None else runtime.host_limit()
    whole = HostBytes(weights=0 if _stays_on_disk(wrapping) else nbytes)
    forecast = MemoryForecast(wrapping["name"], "for its weights", whole, HostBytes(), limit)
    if not forecast.fits:
        warn_user(forecast.explained("is likely to need"), HostMemoryWarning)


def _stays_on_disk(wrapping: Mapping[str, Any]) -> bool:
    return wrapping.get("pin_model") == "off" or wrapping["frozen"] != "memory"


_WRAPPING = frozenset(
    name for made in (wrap_model_to_roundpipe, RoundPipe) for name in inspect.signature(made).parameters
) - {"model"}
