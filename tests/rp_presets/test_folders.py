"""A checkpoint's folder of a stranger: its code does not run, and only files that are safetensors are read."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rp_presets import check_folder, checkpoint_bytes, load_packed, load_pretrained
from tiny_models import untied
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM

CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class TheirConfig(LlamaConfig):
    model_type = "theirs"
class TheirModel(LlamaForCausalLM):
    config_class = TheirConfig
def generate(*args, **kwargs):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in two files."""
    torch.manual_seed(0)
    untied().save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return tmp_path / "model"


@pytest.fixture
def marker(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the folder's code writes when it is run; whoever is asked whether it may says yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    text = CODE.format(marker=str(tmp_path / "marker"))
    (folder / "theirs.py").write_text(text)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(text)
    return tmp_path / "marker"


def changed(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


OWN_CLASSES = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
ROUTES: dict[str, tuple[dict[str, Any], Any]] = {
    "configuration": ({"model_type": "theirs", "auto_map": OWN_CLASSES}, None),
    "model": ({"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "theirs.TheirModel"}}, None),
    "model named": ({"auto_map": {"AutoModelForMaskedLM": "theirs.TheirModel"}}, AutoModelForMaskedLM),
    "kernels": ({"attn_implementation": "someone/kernel"}, None),
    "kernels inside": ({"text_config": {"attn_implementation": {"": "someone/kernel"}}}, None),
    "packed": (
        {
            "model_type": "theirs",
            "auto_map": OWN_CLASSES,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        None,
    ),
}


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}, {"trust_remote_code": None}])
@pytest.mark.parametrize("route", ROUTES)
def test_code_of_a_folder_does_not_run_unless_it_is_trusted(
    route: str, trust: dict[str, Any], folder: Path, marker: Path
) -> None:
    fields, model_class = ROUTES[route]
    changed(folder, **fields)
    load: Callable[..., Any] = load_packed if route == "packed" else load_pretrained

    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder, model_class, **trust)

    assert not marker.exists()


def test_code_of_a_folder_beside_a_class_of_transformers_does_not_run(folder: Path, marker: Path) -> None:
    changed(folder, auto_map={"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"})

    model = load_pretrained(folder)

    assert type(model) is LlamaForCausalLM
    assert not marker.exists()


def test_code_of_a_folder_that_is_trusted_runs(folder: Path, marker: Path) -> None:
    changed(folder, model_type="theirs", auto_map=OWN_CLASSES)

    model = load_pretrained(folder, AutoModelForCausalLM, trust_remote_code=True)

    assert type(model).__name__ == "TheirModel"
    assert marker.read_text() == "ran"


def with_a_pipe(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "generation_config.json")


def with_a_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(folder)
        try:
            made.bind("vocab.json")
        finally:
            os.chdir(here)


def with_a_device(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def with_what_the_system_makes(folder: Path) -> None:
    (folder / "merges.txt").symlink_to("/proc/self/environ")


def with_a_pipe_inside(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "tools.jinja")


def naming(name: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        first = next(iter(content["weight_map"]))
        content["weight_map"][first] = name
        index.write_text(json.dumps(content))

    return change


def with_nothing_mapped(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": ["model.bin"]}')


def with_deep_json(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def with_a_list_as_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def with_pickled_weights_named(folder: Path) -> None:
    changed(folder, transformers_weights="adapter_model.bin")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (with_a_pipe, "generation_config.json must be a file, but is a pipe"),
    "socket": (with_a_socket, "vocab.json must be a file, but is a socket"),
    "device": (with_a_device, "config.json must be a file, but is a device"),
    "system": (with_what_the_system_makes, "is a link to what the system makes"),
    "pipe inside": (with_a_pipe_inside, "tools.jinja must be a file, but is a pipe"),
    "pickle": (naming("pytorch_model.bin"), "names 'pytorch_model.bin', which is not read"),
    "parent": (naming("../other/model.safetensors"), "must name files in its own folder"),
    "absolute": (naming("/etc/model.safetensors"), "must name files in its own folder"),
    "number": (naming(7), "must have a 'weight_map'"),
    "list": (with_nothing_mapped, "must have a 'weight_map'"),
    "deep": (with_deep_json, "must be JSON of few levels"),
    "no object": (with_a_list_as_configuration, "must be a JSON object, but is a list"),
    "weights": (with_pickled_weights_named, "names the weights 'adapter_model.bin'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_with_what_is_not_read_is_refused_by_name(case: str, folder: Path) -> None:
    change, words = REFUSED[case]
    change(folder)

    for load in (check_folder, load_pretrained):
        with pytest.raises(ValueError, match=words):
            load(folder)


def test_links_to_files_are_files(folder: Path, tmp_path: Path) -> None:
    stored = tmp_path / "blobs"
    stored.mkdir()
    for file in folder.iterdir():
        file.rename(stored / file.name)
        file.symlink_to(stored / file.name)

    check_folder(folder)

    assert type(load_pretrained(folder)) is LlamaForCausalLM


@pytest.mark.parametrize("length", [2**63, 10**9, 10**6])
def test_a_header_longer_than_its_file_is_refused_before_it_is_read(length: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")

    with pytest.raises(ValueError, match=r"model.safetensors must be a safetensors file"):
        checkpoint_bytes(tmp_path)
