"""Look up the preset for a model and convert it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from rp_presets.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class _Preset:
    """The model class of a family, and its conversion, which returns None for other classes."""

    model_class: str
    convert: Callable[[nn.Module], nn.Sequential | None]


def _qwen3(model: nn.Module) -> nn.Sequential | None:
    # Import late: the module imports transformers.
    from rp_presets import qwen3

    return qwen3.to_row(model)


_PRESETS: Mapping[str, _Preset] = MappingProxyType({"qwen3": _Preset("Qwen3ForCausalLM", _qwen3)})


def supported() -> tuple[str, ...]:
    """The model types (`config.model_type`) that have a preset, in alphabetical order.

    >>> supported()
    ('qwen3',)
    """
    return tuple(sorted(_PRESETS))


def to_sequential(model: nn.Module) -> nn.Sequential:
    """Convert a model to a row of layers that holds the model's own modules and computes the same outputs.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ... )
    >>> model = Qwen3ForCausalLM(config)
    >>> row = to_sequential(model)
    >>> [type(layer).__name__ for layer in row]
    ['Embed', 'Block', 'Block', 'Head']
    >>> row[0].embed_tokens is model.model.embed_tokens
    True

    The first layer takes the arguments of the model's forward; every other layer takes the result of the layer
    before; the last returns the model's output object, with the logits of all positions: (batch, positions,
    vocabulary). No parameter is copied: training the row trains the model, and tied weights stay tied.

    Raises:
        TypeError: the model is not a torch module.
        UnsupportedModel: the model type has no preset, or the model has another class than its preset takes.
        ValueError: the model has a setting that the row does not support; the message says what to do.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise TypeError(f"model must be a torch.nn.Module, but is a {type(model).__name__}")
    preset = _PRESETS.get(_model_type(model))
    row = None if preset is None else preset.convert(model)
    if row is None:
        raise UnsupportedModel(_unsupported(model))
    return row


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", None))


def _unsupported(model: nn.Module) -> str:
    pairs = ", ".join(f"{model_type} ({_PRESETS[model_type].model_class})" for model_type in supported())
    return (
        f"no preset for model type {_model_type(model)!r} of class {type(model).__name__}; supported: {pairs}. "
        "Write the model as an nn.Sequential yourself, or pass the supported model that it wraps"
    )
