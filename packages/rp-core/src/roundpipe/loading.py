"""`from_pretrained`: loads a Hugging Face checkpoint into a model's blocks without having its weights twice."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import rp_presets
from rp_transfer import GivingBack
from torch import nn

from roundpipe.models.auto import AutoRoundPipe
from roundpipe.models.base import caller
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.wrap import wrap_model_to_roundpipe


def from_pretrained(
    directory: str | os.PathLike[str],
    model_class: type[Any] | None = None,
    *,
    adapt: Callable[[Any], nn.Module] | None = None,
    **options: Any,
) -> RoundPipe | AutoRoundPipe:
    """Load a checkpoint of transformers and wrap it; its weights go from mapped files into the model's blocks.

    Args:
        directory: a local checkpoint of safetensors files, such as one of the hub's cache.
        model_class: a class of transformers; default: ``AutoModelForCausalLM``.
        adapt: called with the loaded model before it is wrapped, such as to add adapters; returns what to wrap.
        options: those of `wrap_model_to_roundpipe` and `RoundPipe` are passed to it, all others, such as `dtype`,
            to `model_class.from_pretrained`.

    The result is that of `wrap_model_to_roundpipe` on the model that transformers loads. While it is made, the
    resident memory of the process grows by at most 1.1 times the weights' bytes, if these are 500 MB or more: by
    the blocks, and some 20 MiB of files. Weights that transformers computes, in a cast or by stacking experts, are
    in memory before their block is made, so the largest block of those comes on top. Masters, gradients and a
    second block are made later, for training.

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

    Raises what `rp_presets.load_pretrained` and `wrap_model_to_roundpipe` raise, and `TypeError` if `adapt` is not
    callable or does not return a module.
    """
    if adapt is not None and not callable(adapt):
        raise TypeError(f"adapt must be a function of the loaded model, but is {adapt!r} instead")
    wrapping = {name: options.pop(name) for name in _WRAPPING & options.keys()}
    wrapping.setdefault("name", caller())
    with GivingBack():
        model = rp_presets.load_pretrained(directory, model_class, **options)
        model = model if adapt is None else adapt(model)
    return wrap_model_to_roundpipe(model, **wrapping)


_WRAPPING = frozenset(
    name for made in (wrap_model_to_roundpipe, RoundPipe) for name in inspect.signature(made).parameters
) - {"model", "roundpipe_kwargs"}
