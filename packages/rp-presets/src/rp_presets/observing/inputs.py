"""Make a few tokens, pixels or sound samples to observe a model with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from rp_presets.errors import UnsupportedModel

_ROWS, _TOKENS = 2, 6


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Make small inputs for the model's forward from its config, on the device of its first parameter.

    Raises `UnsupportedModel` for a model without a config, or whose main input is of an unknown kind.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedModel(
            f"{type(model).__name__} has no config that describes its inputs; pass arguments of its forward: "
            "to_sequential(model, example_inputs={...})"
        )
    name = str(getattr(model, "main_input_name", "input_ids"))
    inputs = {name: _tensor(name, config)}
    parameters = inspect.signature(type(model).forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _tokens(config)
    both = {"input_ids", "pixel_values"} <= parameters.keys() and name == "input_ids"
    if both and hasattr(config, "vision_config") and hasattr(model, "logit_scale"):
        inputs["pixel_values"] = _pixels(config)
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _tensor(name: str, config: Any) -> Tensor:
    makers = {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "input_features": _features,
        "input_values": _sound,
    }
    if name not in makers:
        raise UnsupportedModel(
            f"the model's main input, {name!r}, is of an unknown kind; pass inputs: to_sequential(model, "
            "example_inputs={...})"
        )
    return makers[name](config)


def usual_tokens(config: Any) -> list[int]:
    """Return tokens of a model's vocabulary that no setting of its config names, at most 512."""
    special = set(_special_tokens(config))
    size = int(_first(config, ("vocab_size",), 32))
    return [token for token in range(min(size, 512)) if token not in special] or [0]


def _tokens(config: Any) -> Tensor:
    usual = usual_tokens(config)
    ids = torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7 + 3
    tokens = torch.tensor(usual)[ids % len(usual)]
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and isinstance(end, int):
        # Sequence classifiers with an encoder and a decoder read the hidden state at the end token.
        tokens[:, -1] = end
    return tokens


def _special_tokens(config: Any) -> Iterable[int]:
    for one in (config, *_inner(config)):
        for name, value in _fields(one).items():
            if name.endswith(("_token_id", "_token_index")):
                yield from value if isinstance(value, list) else (value,)


def _pixels(config: Any) -> Tensor:
    size = _first(config, ("image_size",), 32)
    height, width = cast("list[int]", size) if isinstance(size, list | tuple) else (size, size)
    channels = int(_first(config, ("num_channels", "in_channels"), 3))
    return _varied(_ROWS, channels, height, width)


def _features(config: Any) -> Tensor:
    bins = int(_first(config, ("num_mel_bins", "feature_size"), 80))
    positions = int(_first(config, ("max_source_positions",), 50))
    return _varied(_ROWS, bins, 2 * positions)


def _sound(config: Any) -> Tensor:
    del config
    return _varied(_ROWS, 2000)


def _varied(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _first(config: Any, names: Iterable[str], default: Any) -> Any:
    for one in (config, *_inner(config)):
        for name in names:
            value = getattr(one, name, None)
            if value is not None:
                return value
    return default


def _fields(config: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", vars(config))


def _inner(config: Any) -> list[Any]:
    if config is None:
        return []
    return [
        value for name, value in _fields(config).items() if name.endswith("config") and hasattr(value, "to_dict")
    ]
