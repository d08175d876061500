"""GGUF files, made by llama.cpp's own converters from a checkout of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused, Unwritable

from rp_export.adapter import config_of
from rp_export.formats.gguf_check import check_adapter, check_model

_CHECKOUT = "ROUNDPIPE_LLAMA_CPP"
_OF_MODELS, _OF_ADAPTERS = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
_NEEDED = ("gguf", "sentencepiece")
# Of what a converter prints when it fails, the last lines say why.
_LINES_SHOWN = 3
# What a file of the format cannot say of an adapter, by PEFT's names; it has one rank, one scale and two matrices.
_BEYOND = (
    "use_dora",
    "use_rslora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "alpha_pattern",
)


def check_converter(llama_cpp: Path | None) -> Path:
    """Return the checkout of llama.cpp: the given one, or that of ``ROUNDPIPE_LLAMA_CPP``.

    Raises `Refused`, with what to install, if something is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(f"--format gguf needs {' and '.join(missing)}: pip install 'rp-cli[gguf]'")
    given = os.environ.get(_CHECKOUT) or None if llama_cpp is None else llama_cpp
    if given is None:
        raise Refused(
            "--format gguf needs a checkout of llama.cpp, whose converter makes the file: git clone --depth 1 "
            f"https://github.com/ggml-org/llama.cpp, and name its folder by --llama-cpp or {_CHECKOUT}"
        )
    folder = Path(given)
    for name in (_OF_MODELS, _OF_ADAPTERS):
        if not (folder / name).is_file():
            raise Refused(f"--llama-cpp {folder} must be a checkout of llama.cpp, but has no {name}")
    return folder


def write_model_file(
    checkout: Path, model: Path, file: Path, kind: str = "auto", *, unchecked: bool = False
) -> str:
    """Convert a model's folder; return what to tell of the comparison with it. `kind`: of the file's numbers.

    Raises `Unwritable` if the converter fails, or if the file has other values.
    """
    _run(checkout / _OF_MODELS, str(model), "--outfile", str(file), "--outtype", kind)
    return "not compared with the model's" if unchecked else check_model(file, model)


def write_adapter_file(
    checkout: Path, adapter: Path, base: Path, file: Path, kind: str = "auto", *, unchecked: bool = False
) -> str:
    """Convert an adapter's folder; `base`: that of its model. Raises as `write_model_file`."""
    _run(
        checkout / _OF_ADAPTERS,
        str(adapter),
        "--base",
        str(base),
        "--outfile",
        str(file),
        "--outtype",
        kind,
    )
    return "not compared with the adapter's" if unchecked else check_adapter(file, adapter)


def check_simple(adapter: Path) -> None:
    """Raise `Refused` for an adapter with what a GGUF file cannot say."""
    config: Any = config_of(adapter)
    beyond = [name for name in _BEYOND if getattr(config, name, None)]
    if config.peft_type.value != "LORA":
        beyond = [config.peft_type.value]
    elif config.bias != "none":
        beyond.append("bias")
    if beyond:
        raise Refused(
            f"--adapter-only: a GGUF file holds plain LoRA, but the adapter has {', '.join(beyond)}; export the "
            "merged model, without --adapter-only"
        )


def _run(script: Path, *arguments: str) -> None:
    # In a process of its own: it changes the search path and the settings of torch and logging.
    ran = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, errors="replace", check=False
    )
    if ran.returncode:
        last = " | ".join(ran.stderr.strip().splitlines()[-_LINES_SHOWN:])
        raise Unwritable(f"{script.name} of llama.cpp cannot convert the model: {last}")
