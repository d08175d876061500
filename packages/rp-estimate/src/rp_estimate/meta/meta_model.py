"""A language model from its config only, on the meta device, where tensors have shapes but no memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from roundpipe.loading import STORED
from rp_adapters.choice import Adapters, Continued
from rp_adapters.making import adapt, saved_by
from rp_adapters.vocabulary import check_trained, grow
from rp_packing import pack_frozen
from rp_presets import check_config, lists_of_layers, packed_kind, read_object, unasked
from rp_strangers.code import told
from rp_strangers.files import check_stored
from rp_strangers.limited import Budget, limited
from rp_strangers.refusing import refusing, refusing_all
from rp_trainer.errors import Refused
from torch import nn

from rp_estimate.meta.model_class import model_class

# A config has some kilobytes: a larger file is not a config, and is not read.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MOST_BYTES = 16 * 2**20
# The scheduler's limit.
_MOST_LAYERS = 4000
# Lengths make no lists, but tensors, which have no memory on the meta device. Others are taken for counts.
_LENGTHS = (
    "size",
    "dim",
    "position",
    "vocab",
    "token",
    "theta",
    "length",
    "window",
    "inner",
    "embd",
    "ctx",
    "hidden",
    "ffn",
    "_id",
    "base",
    "freq",
    "channels",
    "features",
    "rank",
    "width",
    "block",
    "chunk",
)
_COUNTS = ("layer", "expert", "head", "label", "depth", "stage", "level", "group", "codebook", "stack")
_MOST_LENGTH = 2**25
# The number of dimensions of stacked experts.
_STACK = 3


def model_of(
    path: Path,
    adapters: Adapters | Continued | None = None,
    *,
    dtype: torch.dtype | None = None,
    pack: str | None = None,
    vocabulary: int | None = None,
    with_images: bool = False,
) -> nn.Module:
    """Create the model of a config file, with these adapters, if any, as PEFT makes them, and all else frozen.

    `dtype`: the weights'; None for the config's, bfloat16 if it has none. `pack`: see `packing_of`; this does not
    pack the model. `vocabulary`: how many tokens it is enlarged for. `with_images`: whether it reads some.

    Raises `Refused` for a config of another kind, and for adapters that do not fit the model.
    """
    model = _made(path, config_of(path, is_stored=pack == STORED), dtype, with_images)
    if not lists_of_layers(model):
        raise Refused(
            f"--model {path}: a {type(model).__name__} has no list of layers, so there is nothing to plan"
        )
    check_trained(model, vocabulary, None if adapters is None else saved_by(adapters))
    grow(model, vocabulary)
    if adapters is not None:
        # The model itself holds the adapters, as PEFT puts them into its layers.
        adapt(model, adapters)
        _narrow(model, adapters.dtype)
    return model.train()


def _narrow(model: nn.Module, dtype: str | None) -> None:
    """Give trained parameters of more bits this dtype, as devices get them."""
    if dtype is None:
        return
    to: torch.dtype = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.itemsize > to.itemsize:
            parameter.data = parameter.data.to(to)


def check_positions(model: nn.Module, sequence: int, of_images: int = 0) -> None:
    """Raise `Refused` for a sequence, with the tokens of images beside it, that is longer than the model reads."""
    most: Any = getattr(cast(Any, model).config.get_text_config(), "max_position_embeddings", None)
    # Some configs have -1, or nothing, for any number.
    if isinstance(most, int) and 0 < most < sequence + of_images:
        what = "--sequence and the tokens of --images together" if of_images else "--sequence"
        given = f"{sequence} + {of_images}" if of_images else sequence
        raise Refused(f"{what} must be at most {most}, the positions that the model has, but is {given}")


@dataclass(frozen=True, slots=True)
class FrozenPacking:
    """The format of a model's packed frozen weights. `of`: which are packed; experts are 3-dimensional stacks."""

    format: str
    of: Literal["all", "experts", "linear layers"] = "all"

    def pack(self, model: nn.Module) -> None:
        """Pack a model on the meta device. Raises `Refused` for weights that do not fit the format."""
        with refusing(f"--pack {self.format}: "):
            pack_frozen(model, self.format, select=self._select(model))

    def _select(self, model: nn.Module) -> Callable[[str, nn.Parameter], bool] | None:
        match self.of:
            case "all":
                return None
            case "experts":
                return lambda _, parameter: parameter.ndim == _STACK and not parameter.requires_grad
            case "linear layers":
                weights = _linear_weights(model)
                return lambda name, parameter: name in weights and not parameter.requires_grad


def _linear_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights of a model's linear layers, without the output head."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    modules = cast("Any", model).named_modules()
    return {f"{name}.weight" for name, one in modules if isinstance(one, nn.Linear) and one is not head}


def packing_of(path: Path, pack: str | None) -> FrozenPacking | None:
    """Return how ``--pack`` packs the model of a config file; None for not at all.

    Raises `Refused` if weights are to stay as they are stored, but are not stored packed.
    """
    if pack is None:
        return None
    if pack != STORED:
        return FrozenPacking(pack)
    with refusing("--model "):
        kind = packed_kind(path.parent)
    if kind is None:
        raise Refused(f"--pack {STORED}: {path} is of weights that are not packed; name a format, such as nf4")
    match kind:
        case "mxfp4":
            # As published: GPT-OSS has all weights except its experts in bf16.
            return FrozenPacking(kind, "experts")
        case "fp8":
            return FrozenPacking(kind)
        case _:
            # bitsandbytes replaces modules, which stacked experts are not.
            return FrozenPacking(kind, "linear layers")


def config_of(path: Path, *, is_stored: bool) -> Any:  # Any: each model has its own class
    """Load the configuration of a model. `is_stored`: whether packed weights stay as they are stored.

    Raises `Refused` for a file that is no configuration of transformers, or that cannot be used.
    """
    from transformers import AutoConfig  # importing transformers takes seconds

    loader: Any = AutoConfig
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    with refusing("--model: "):
        fields = read_object(path, _MOST_BYTES)
    if "model_type" not in fields:
        raise Refused(f"--model {path} must be a config.json of transformers, but has no model_type")
    if fields.get("quantization_config") and not is_stored:
        raise Refused(
            f"--model {path} is of quantized weights, which are not trained; use the model before quantization, "
            f"or train adapters on it with --lora and --pack {STORED}"
        )
    _check_layers(path, fields)
    with refusing("--model "):
        check_config(fields, path)
    # transformers checks configs in many ways.
    with refusing_all(f"--model {path} cannot be used: ", told), unasked():
        config = loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        if is_stored and hasattr(config, "quantization_config"):
            # Otherwise transformers would create its own modules for packed weights.
            del config.quantization_config
        return config


def try_if_unusual(path: Path) -> None:
    """Create a config's model in a limited process first, if it has numbers that might become long lists.

    Raises `Refused` if that exceeds the limits, for what cannot be created, perhaps for want of memory, and for a
    file of weights.
    """
    check_stored(f"--model {path}", path)
    if path.suffix in _WEIGHTS:
        raise Refused(
            f"--model {path} is a file of weights; name the folder that it is in, which has a config.json"
        )
    if path.stat().st_size > _MOST_BYTES or not _is_unusual(_read_or_none(path)):
        return

    def work(budget: Budget) -> Iterator[bytes]:
        budget.at(f"--model {path}")
        model_of(path, pack=STORED)
        yield b""

    list(limited("creating the model", "name another config.json", work))


def _read_or_none(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def _is_unusual(content: object) -> bool:
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += cast("list[object]", value)
        elif isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            waiting += fields.values()
            numbers = [(name, one) for name, one in fields.items() if isinstance(one, int | float)]
            if any(abs(one) > _most_of(name) for name, one in numbers):
                return True
    return False


def _most_of(name: str) -> int:
    """Return up to which number a field costs no more than a moment: one of a length, or one of a count."""
    is_length = any(part in name for part in _LENGTHS) and not any(part in name for part in _COUNTS)
    return _MOST_LENGTH if is_length else _MOST_LAYERS


def _check_layers(path: Path, fields: dict[str, object]) -> None:
    """Refuse too many layers: configs of transformers create lists of this length without a check."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_layers(path, cast(dict[str, object], value))
        elif "layer" in name and isinstance(value, int) and value > _MOST_LAYERS:
            raise Refused(f"--model {path}: {name} must be at most {_MOST_LAYERS}, but is {value}")


def _made(path: Path, config: Any, dtype: torch.dtype | None, with_images: bool) -> nn.Module:
    maker = model_class(config, with_images=with_images)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    # A model's constructor is foreign code.
    what = f"--model {path}: no language model can be created from it: "
    with refusing_all(what, told), torch.device("meta"), unasked():
        return cast(nn.Module, maker.from_config(config, dtype=dtype, trust_remote_code=False))
