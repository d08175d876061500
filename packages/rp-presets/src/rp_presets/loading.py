"""Load a checkpoint of transformers from a directory of safetensors files; weights stay memory-mapped."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rp_presets.files.checked import check_checkpoint, weight_files
from rp_presets.files.faults import explained
from rp_presets.files.folders import check_folder, read_config
from rp_presets.files.whole import read_header

_LATER = "load the model with transformers' own from_pretrained, then call wrap_model_to_roundpipe"
_DEVICES = "weights stay in host memory, and a Runtime chooses the devices; omit it"
# Options of transformers' from_pretrained that would put weights elsewhere than in memory-mapped files.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_buffers"), _DEVICES),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), _DEVICES),
    **dict.fromkeys(
        ("quantization_config", "load_in_4bit", "load_in_8bit"), "weights are not quantized; " + _LATER
    ),
    **dict.fromkeys(("gguf_file", "state_dict", "from_tf", "from_flax"), "only safetensors are read; " + _LATER),
    "disable_mmap": "without memory mapping the weights are in memory twice; omit it",
    "output_loading_info": "missing and unexpected keys are logged, as transformers does; omit it",
}
_SAFE = ("trust_remote_code", "use_safetensors", "local_files_only")


def load_pretrained(
    directory: str | os.PathLike[str], model_class: type[Any] | None = None, **options: Any
) -> nn.Module:
    """Load a model as transformers does. Weights that need no conversion stay memory-mapped.

    Args:
        directory: a checkpoint: ``config.json`` and one or more safetensors files.
        model_class: a class of transformers with `from_pretrained`; default: ``AutoModelForCausalLM``.
        options: options of its `from_pretrained`, such as `dtype`.

    Transformers does everything: it renames, fuses, ties and casts weights, and reports missing and unexpected
    keys. The calling thread reads the tensors one by one. Code of the checkpoint runs only if the options have
    ``trust_remote_code=True``; transformers' question whether to run it is answered with no.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    ... )
    >>> with TemporaryDirectory() as folder:
    ...     LlamaForCausalLM(config).save_pretrained(folder)
    ...     type(load_pretrained(folder)).__name__
    'LlamaForCausalLM'

    Raises:
        NotADirectoryError: there is no such directory.
        FileNotFoundError: it has no safetensors files.
        TypeError: `model_class` has no `from_pretrained`, or the model does not take an option.
        ValueError: an option or the checkpoint needs an unsupported feature, or the checkpoint has what is not
            read, such as pickles; the message says what to do.
        DamagedFile: a `ValueError` for a file that is cut, empty or of another kind, or does not fit the others.
    """
    loader = check_loading(directory, model_class, options)
    rest = {name: value for name, value in options.items() if name not in _SAFE}
    trusted = is_trusted(options)
    with one_by_one(), unasked(is_trusted=trusted), explained(directory, loader, options):
        return loader.from_pretrained(
            os.fspath(directory),
            trust_remote_code=trusted,
            use_safetensors=True,
            local_files_only=True,
            **rest,
        )


def is_trusted(options: Mapping[str, Any]) -> bool:
    """Return whether options of `from_pretrained` let a checkpoint's code run. Only True itself does.

    >>> is_trusted({"trust_remote_code": None}), is_trusted({"trust_remote_code": True})
    (False, True)
    """
    return options.get("trust_remote_code") is True


def checkpoint_bytes(
    directory: str | os.PathLike[str], dtype: torch.dtype | None = None, *, subfolder: str = ""
) -> int:
    """Return the bytes of a checkpoint's tensors, from the headers of its safetensors files.

    Args:
        dtype: the dtype of floating-point tensors after loading; None: the dtype in which they are saved.
        subfolder: the folder inside the directory that holds the files.

    A model class may use only some of them.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.torch import save_file
    >>> with TemporaryDirectory() as folder:
    ...     tensors = {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.int8)}
    ...     save_file(tensors, f"{folder}/model.safetensors")
    ...     checkpoint_bytes(folder), checkpoint_bytes(folder, torch.bfloat16)
    (29, 17)
    """
    folder = Path(directory) / subfolder
    return sum(_nbytes(tensor, dtype) for file in weight_files(folder) for tensor in read_header(file).values())


def _nbytes(tensor: Mapping[str, Any], dtype: torch.dtype | None) -> int:
    start, end = tensor["data_offsets"]
    is_floating = tensor["dtype"].startswith(("F", "BF"))
    return end - start if dtype is None or not is_floating else math.prod(tensor["shape"]) * dtype.itemsize


def check_loading(
    directory: str | os.PathLike[str],
    model_class: Any,
    options: Mapping[str, Any],
    *,
    may_be_packed: bool = False,
) -> Any:
    """Check the arguments of `load_pretrained`; return the class that loads. Raises like `load_pretrained`."""
    _check_options(options)
    folder, subfolder = Path(directory), str(options.get("subfolder") or "")
    _check_checkpoint(folder, directory, subfolder)
    for part in {folder, folder / subfolder}:
        check_folder(part, trust_remote_code=is_trusted(options))
    check_checkpoint(folder / subfolder)
    if not may_be_packed and read_config(folder / subfolder).get("quantization_config"):
        raise ValueError(
            f"{directory} is quantized according to its config.json: pass pack='stored' to "
            f"roundpipe.from_pretrained, which keeps FP8, MXFP4, and bitsandbytes' NF4 and int8; or {_LATER}"
        )
    return _checked_class(model_class)


def _checked_class(model_class: Any) -> Any:
    if model_class is None:
        from transformers import AutoModelForCausalLM  # importing transformers takes seconds

        return AutoModelForCausalLM
    if not callable(getattr(model_class, "from_pretrained", None)):
        raise TypeError(
            f"model_class must be a class of transformers with from_pretrained, but is {model_class!r} instead"
        )
    return model_class


def _check_options(options: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if options.get(name) not in (None, False):
            raise ValueError(f"{name} is not supported: {reason}")
    if options.get("use_safetensors") is False:
        raise ValueError(f"use_safetensors=False is not supported: only safetensors are read; {_LATER}")
    if getattr(options.get("config"), "quantization_config", None):
        raise ValueError(f"the config has a quantization_config: weights are not quantized; {_LATER}")


def _check_checkpoint(directory: Path, given: object, subfolder: str) -> None:
    if not directory.is_dir():
        raise NotADirectoryError(
            f"directory must be a local directory with a checkpoint, but there is none at {given!r}; "
            "huggingface_hub.snapshot_download downloads a model from the hub and returns its directory"
        )
    if (directory / "adapter_config.json").exists():
        raise ValueError(
            f"{directory} holds an adapter: load the directory of its base model, and pass "
            "adapt=lambda model: PeftModel.from_pretrained(model, ...)"
        )
    if not any((directory / subfolder).glob("*.safetensors")):
        raise FileNotFoundError(
            f"{directory / subfolder} has no safetensors files; convert the checkpoint: load it with "
            "transformers, then call save_pretrained"
        )


@contextmanager
def unasked(*, is_trusted: bool = False) -> Generator[None]:
    """Inside the context transformers refuses a folder's code where it would ask the user whether to run it.

    All calls say that code is not trusted, but some of transformers' classes load others without passing that on.

    >>> from transformers.dynamic_module_utils import resolve_trust_remote_code
    >>> with unasked():
    ...     try:
    ...         resolve_trust_remote_code(None, "folder", has_local_code=False, has_remote_code=True)
    ...     except ValueError:
    ...         print("refused")
    refused

    `is_trusted`: do nothing.
    """
    if is_trusted:
        yield
        return
    from transformers import dynamic_module_utils

    # Transformers' own switch for machines on which nobody could answer; it belongs to the whole process.
    name = "TIME_OUT_REMOTE_CODE"
    before = getattr(dynamic_module_utils, name)
    setattr(dynamic_module_utils, name, 0)
    try:
        yield
    finally:
        setattr(dynamic_module_utils, name, before)


@contextmanager
def one_by_one() -> Generator[None]:
    """Keep transformers from reading tensors ahead on other threads, by its environment variable for that."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
