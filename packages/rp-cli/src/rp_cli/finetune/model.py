"""Load the model and the tokenizer of a fine-tuning, from a folder or a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from roundpipe import (
    Fp8,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    from_pretrained,
    pack_frozen,
    wrap_model_to_roundpipe,
)
from roundpipe.loading import STORED
from rp_adapters.making import adapt
from rp_adapters.vocabulary import grow
from rp_data.chat.reply_ends import ReplyEnds
from rp_data.images.processor import Sight, has_processor, sight_of
from rp_data.images.store import Store
from rp_estimate.meta.meta_model import config_of, try_if_unusual
from rp_estimate.meta.model_class import model_class, placeholders, sees
from rp_export.writing import write_ends
from rp_optim import DiskError
from rp_presets import DamagedFile, UnsupportedModel, check_checkpoint, check_folder, check_tokenizer, unasked
from rp_sources.models import called
from rp_sources.trained_on import identity_of, write_beside
from rp_strangers.code import told
from rp_strangers.refusing import refusing, refusing_all
from rp_trainer.errors import Refused
from torch import nn

from rp_cli.finetune.options import FineTuning

# Weight files that are not read; a folder with one of these does not count as one without weights.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.ckpt", "*.index.json")
# How PEFT begins to tell that a file of adapters has the embeddings, too.
_SAVES_EMBEDDINGS = r"Setting `save_embedding_layers` to `True`"
# Of a list of weights, so many are named.
_NAMES_SHOWN = 3


def check_folders(options: FineTuning) -> None:
    """Raise `Refused` for a folder of the model or the tokenizer that cannot be read without danger."""
    folders = [options.model if options.model.is_dir() else options.model.parent, options.tokenizer]
    for folder in folders:
        if folder is not None and folder.is_dir():
            with refusing(f"--{'tokenizer' if folder == options.tokenizer else 'model'}: "):
                check_folder(folder)
    try_if_unusual(config_file(options))


def config_file(options: FineTuning) -> Path:
    """Return the path of the model's ``config.json``. Raises `Refused` if it is missing, or for an adapter."""
    path = options.model
    if (path / "adapter_config.json").is_file():
        raise Refused(
            f"--model {path} holds an adapter; name the model that it was trained for, and the adapter by "
            "--init-adapter"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise Refused(
            "--model must be a folder with a model, a config.json, or a name on the hub such as Qwen/Qwen3-8B, "
            f"but there is no {file}; `hf download NAME --local-dir FOLDER` downloads a model from the hub"
        )
    return file


def check_model(options: FineTuning) -> None:
    """Raise `Refused` unless the configuration can be used."""
    config_of(config_file(options), is_stored=options.pack == STORED)


def check_weights(options: FineTuning) -> None:
    """Raise `Refused` unless all weight files are whole; no weight is read."""
    with refusing("--model: "):
        if options.model.is_dir():
            has_weights(options)
            check_checkpoint(options.model)


def has_weights(options: FineTuning) -> bool:
    """Return whether the model has weights; otherwise they are random.

    Raises `Refused` for a folder whose weights are in other files than safetensors.
    """
    if not options.model.is_dir():
        return False
    if any(options.model.glob("*.safetensors")):
        return True
    others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in options.model.glob(pattern))
    if others:
        raise Refused(
            f"--model {options.model} has no safetensors files, but {others[0]}, which is not read; load the "
            "model with transformers and save it again with save_pretrained"
        )
    return False


def loader_of(options: FineTuning) -> Callable[[], Any]:  # Any: each model has its own class
    """Return a function that loads the tokenizer. Raises `Refused` if there is none, as does the function."""
    # Imported here, for two processes: the function is first called in a forked one.
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    folder = options.tokenizer or config_file(options).parent
    loader: Any = AutoTokenizer
    if not folder.is_dir() or not any(folder.glob("*token*")):
        raise Refused(f"there is no tokenizer in {folder}; name a folder that has one with --tokenizer")

    def load() -> Any:
        # Tokenizers check their files in many ways.
        with (
            refusing_all(f"the tokenizer in {folder} cannot be used: ", told),
            refusing("the tokenizer cannot be used: ", (DamagedFile,)),
            unasked(),
        ):
            check_tokenizer(folder)
            tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise Refused(f"the tokenizer in {folder} cannot be used: it is a {type(tokenizer).__name__}")
        return tokenizer

    return load


def sight_for(options: FineTuning) -> Sight | str:
    """Return what makes inputs of images, as the model's own processor does; or why there is none, in words.

    Raises `Refused` for a processor that cannot be used, or takes no such bounds of pixels.
    """
    config = config_of(config_file(options), is_stored=options.pack == STORED)
    if not sees(config):
        return f"--model {options.model} reads none: it is a {config.model_type}"
    folder = options.tokenizer or config_file(options).parent
    if not has_processor(folder):
        return f"there is no processor in {folder} (processor_config.json); name a folder that has one"
    bounds = {"min_pixels": options.min_pixels, "max_pixels": options.max_pixels}
    return sight_of(folder, bounds, Store.opener("--image-cache", options.image_cache, options.image_cache_gb))


def placeholders_in(config: Path) -> frozenset[int]:
    """Return the tokens that the model of a config file replaces by what it sees or hears."""
    return placeholders(config_of(config, is_stored=True))


def pad_of(tokenizer: Any) -> int:
    """Return the token that pads sequences; no label and no other document attends to it."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in candidates if token is not None), 0)


def wrapped(
    options: FineTuning,
    runtime: Runtime,
    num_microbatch: int,
    vocabulary: int | None = None,
    *,
    with_images: bool = False,
) -> RoundPipe:
    """Load and wrap the model, with adapters if requested, ready to train.

    `vocabulary`: how many tokens it is enlarged for. `with_images`: whether it reads some.

    Raises `Refused` for a model that is not a row of layers and for adapters that match nothing in it;
    `HostMemoryShort`.
    """
    wrapping: dict[str, Any] = {
        "name": called(options.model),
        "use_sequential_preset": True,
        "optim_dtype": getattr(torch, options.optim_dtype),
        "adapter_dtype": None if options.adapter_dtype is None else getattr(torch, options.adapter_dtype),
        "master": _master(options),
        "step_in_backward": options.step_in_backward,
        "frozen": options.frozen if options.frozen != "disk" else _on_disk(options),
        "runtime": runtime,
        "compile_layers": options.compile,
        "compute": Fp8(uploads="bf16") if options.compute == "fp8-cast" else options.compute,
        "model_run_config": RoundPipeRunConfig(num_microbatch=num_microbatch, launch=cast(Any, options.launch)),
    }
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        # PEFT and transformers warn each other about calls that later versions change.
        warnings.simplefilter("ignore", FutureWarning)
        # For random weights, and adapters, whose first matrix is random.
        torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
        model = _wrapped(options, wrapping, vocabulary, with_images)
    # Writing a checkpoint would show bars beside the training's own.
    without_bars()
    if with_images and (reason := getattr(model.model, "refuses_images", "")):
        raise Refused(f"--model {options.model} cannot be trained on images by this command: {reason}")
    return cast(RoundPipe, model.train())


def without_bars() -> None:
    """Switch off the progress bars of transformers, and what PEFT warns of when all is as it should be."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # For the whole process: checkpoints are written on other threads.
    warnings.filterwarnings("ignore", _SAVES_EMBEDDINGS)


def _master(options: FineTuning) -> str:
    """The argument `master` of wrapping."""
    if options.master != "disk":
        return options.master
    return _on_disk(options)


def _on_disk(options: FineTuning) -> str:
    return f"disk:{','.join(map(str, options.disk or ()))}"


def _wrapped(options: FineTuning, wrapping: dict[str, Any], vocabulary: int | None, with_images: bool) -> Any:
    dtype = getattr(torch, str(options.dtype))
    adapters = _adapter(options)

    def changed(model: nn.Module) -> nn.Module:
        return adapters(grow(model, vocabulary))

    with (
        refusing(f"--model {options.model} cannot be loaded: ", (ValueError, OSError), told),
        refusing("--model: ", (DamagedFile,)),
        refusing("--frozen: ", (DiskError,)),
        refusing(f"--model {options.model} cannot be trained by this command: ", (UnsupportedModel,)),
        unasked(),
    ):
        return _made(options, changed, dtype, wrapping, with_images)


def _made(
    options: FineTuning,
    adapt: Callable[[Any], nn.Module],
    dtype: torch.dtype,
    wrapping: dict[str, Any],
    with_images: bool,
) -> Any:
    config = config_of(config_file(options), is_stored=options.pack == STORED)
    maker = model_class(config, with_images=with_images)
    if has_weights(options):
        if dtype == torch.bfloat16 and config.dtype in (torch.float32, torch.float16) and options.pack is None:
            kind = str(config.dtype).removeprefix("torch.")
            print(f"--model {options.model} has weights in {kind}, which are rounded; --dtype float32 keeps them")
        own: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False, "pack": options.pack}
        # Packed weights that stay as stored are put together elsewhere.
        loader: Any = maker if options.pack == STORED else _Whole(maker)
        return from_pretrained(options.model, loader, adapt=adapt, **own, **wrapping)
    return wrap_model_to_roundpipe(adapt(_packed(options, _random(maker, config, dtype))), **wrapping)


class _Whole:
    """One of transformers' auto classes for checkpoints that have all weights: it draws others at random."""

    def __init__(self, maker: Any) -> None:
        self._maker = maker

    def from_config(self, config: Any, **given: Any) -> nn.Module:
        """The model of a configuration, with random weights."""
        given.pop("trust_remote_code", None)
        return self._maker.from_config(config, trust_remote_code=False, **given)

    def from_pretrained(self, directory: str, **given: Any) -> nn.Module:
        """The model. Raises `Refused` if weights are missing; tells of those that it has no use for."""
        loader = self._maker
        given.pop("trust_remote_code", None)
        model, keys = loader.from_pretrained(directory, output_loading_info=True, trust_remote_code=False, **given)
        missing, unused = (sorted(map(str, keys[name])) for name in ("missing_keys", "unexpected_keys"))
        if missing:
            raise Refused(
                f"--model {directory} must have all weights of a {type(model).__name__}, but lacks "
                f"{_listed(missing)}; name the checkpoint of a whole language model"
            )
        if unused:
            print(f"not used: {_listed(unused)} of {directory}, which a {type(model).__name__} does not have")
        return model


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _packed(options: FineTuning, model: nn.Module) -> nn.Module:
    """Pack a model of random weights, if requested."""
    if options.pack == STORED:
        raise Refused(f"--pack {STORED}: --model {options.model} has no weights; name a format, such as nf4")
    if options.pack is not None:
        pack_frozen(model.requires_grad_(False), options.pack)
    return model


def _random(maker: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    # Drawn in one dtype, so that a seed gives the same weights in each.
    drawn = maker.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if dtype == torch.float32:
        return drawn
    model = maker.from_config(config, dtype=dtype, trust_remote_code=False)
    model.load_state_dict(drawn.state_dict())
    return model


def _adapter(options: FineTuning) -> Callable[[Any], nn.Module]:
    """Return a function that adds the requested adapters to a model."""
    adapters = options.adapters
    return _as_it_is if adapters is None else partial(adapt, adapters=adapters)


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def trained_on(options: FineTuning) -> dict[str, Any] | None:
    """Return which model the adapters are trained with; None if there are no adapters, or random weights."""
    return identity_of(options.model) if options.is_adapted and has_weights(options) else None


def save_model(
    model: RoundPipe, tokenizer: Any, identity: dict[str, Any] | None, ends: ReplyEnds, folder: Path
) -> None:
    """Write the model, or its adapters, and the tokenizer or the processor as `save_pretrained` does.

    `identity`: of the model that the adapters are for, see `trained_on`. `ends`: where its text ends, too.
    """
    save: Any = model.named_model.save_pretrained
    save(folder)
    print(ends.told(write_ends(folder, ends)), end="", flush=True)
    tokenizer.save_pretrained(folder)
    if identity is not None:
        write_beside(folder, identity)
