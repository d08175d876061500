"""Load a checkpoint of transformers from a directory of safetensors files; weights stay memory-mapped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def load_pretrained(
    directory: str | os.PathLike[str], model_class: type[Any] | None = None, **options: Any
) -> nn.Module:
    """Load a model as transformers does. Weights that need no conversion stay memory-mapped.

    Args:
        directory: a checkpoint: ``config.json`` and one or more safetensors files.
        model_class: a class of transformers with `from_pretrained`; default: ``AutoModelForCausalLM``.
        options: options of its `from_pretrained`, such as `dtype`.

    Transformers does everything: it renames, fuses, ties and casts weights, and reports missing and unexpected
    keys. The calling thread reads the tensors one by one.

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
        ValueError: an option or the checkpoint needs an unsupported feature; the message says what to do.
    """
    loader = check_loading(directory, model_class, options)
    with one_by_one():
        return loader.from_pretrained(
            os.fspath(directory), **{**options, "use_safetensors": True, "local_files_only": True}
        )


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
    return sum(_nbytes(tensor, dtype) for file in weight_files(folder) for tensor in _tensors_in(file))


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads. Other files may hold the same weights under other names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({folder / name for name in names.values()})
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def _tensors_in(file: Path) -> list[Mapping[str, Any]]:
    # The file begins with the header's length in 8 bytes, little-endian, and the header in JSON.
    with file.open("rb") as opened:
        header: Mapping[str, Mapping[str, Any]] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


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


def read_config(directory: Path) -> Mapping[str, Any]:
    """Return the content of a checkpoint's ``config.json``; empty if there is none."""
    file = directory / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


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
