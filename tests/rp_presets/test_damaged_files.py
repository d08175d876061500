"""Damaged files of a checkpoint: each is named in one line, with what is wrong and what to do."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import damaging
import pytest
import torch
from rp_presets import DamagedFile, check_tokenizer, load_packed, load_pretrained
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHARDS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files."""
    folder = tmp_path_factory.mktemp("whole")
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, **heads)  # type: ignore[arg-type]
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="6KB")
    assert len(list(folder.glob("*.safetensors"))) >= SHARDS
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(folder: Path, file: Path | None = None, **options: Any) -> str:
    """What loading says, in one line that names the file."""
    with pytest.raises(DamagedFile) as raised:
        load_pretrained(folder, **options)
    told = str(raised.value)
    assert "\n" not in told
    assert str(folder if file is None else file) in told
    return told


FILES = ["config.json", "generation_config.json", "model.safetensors.index.json", "first shard", "last shard"]


@pytest.mark.parametrize("way", damaging.WAYS)
@pytest.mark.parametrize("name", FILES)
def test_each_damage_of_each_file_is_named(folder: Path, name: str, way: str) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    file = {"first shard": shards[0], "last shard": shards[-1]}.get(name, folder / name)

    damaging.WAYS[way](file)

    told = refused(folder, file)
    wanted = "git lfs pull" if way == "pointer" else "a page of a web server" if way == "html" else ";"
    assert wanted in told


def test_a_shard_that_an_index_names_must_be_there(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()

    assert "is missing, but model.safetensors.index.json names it" in refused(folder, shard)


ENTRIES: dict[str, Any] = {
    "no offsets": {"dtype": "F32", "shape": [2]},
    "one offset": {"dtype": "F32", "shape": [2], "data_offsets": [8]},
    "offsets in words": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "x"]},
    "offsets beyond the file": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]},
    "offsets backwards": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    "offsets without end": {"dtype": "F32", "shape": [2], "data_offsets": [0, float("inf")]},
    "another dtype": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
    "a dtype of another size": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]},
    "a shape in words": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
    "a shape below 0": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
    "no entry": 3,
}


@pytest.mark.parametrize("name", ENTRIES)
def test_each_damage_of_a_header_is_named(folder: Path, name: str) -> None:
    file = min(folder.glob("*.safetensors"))
    header = json.dumps({"a": ENTRIES[name]}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))

    refused(folder, file)


@pytest.mark.parametrize("way", ["pointer", "huge header", "html", "header of 90 MB"])
def test_no_more_memory_is_taken_than_a_file_has_bytes(folder: Path, way: str) -> None:
    file = min(folder.glob("*.safetensors"))
    damaging.WAYS[way](file)
    refused(folder, file)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    refused(folder, file)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - taken < 16 * 1024


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
@pytest.mark.parametrize("name", FILES[:3])
def test_a_file_that_may_not_be_read_is_named(folder: Path, name: str) -> None:
    (folder / name).chmod(0)

    assert "Permission denied" in refused(folder, folder / name)


CONFIGS: dict[str, Any] = {
    "hidden_size": "x",
    "vocab_size": None,
    "num_attention_heads": 0,
    "hidden_act": "nix",
    "dtype": "nix",
    "pad_token_id": 9999,
    "rope_parameters": "x",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_makes_no_model_is_named(folder: Path, name: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: CONFIGS[name]}))

    assert "cannot be used: " in refused(folder, file)


def test_weights_of_another_vocabulary_are_named_with_both_shapes(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        changed = {name: value[:-3] if "lm_head" in name else value for name, value in weights.items()}
        save_file(changed, file, metadata={"format": "pt"})

    told = refused(folder)

    assert "do not fit its config.json: lm_head.weight has the shape [29, 16], not [32, 16]" in told


def test_errors_of_the_caller_stay_what_they_are(folder: Path) -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        load_pretrained(folder, no_such_option=1)


@pytest.mark.parametrize("quantization", ["nf4", ["fp8"], 4])
def test_a_description_of_packed_weights_is_an_object(folder: Path, quantization: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))

    with pytest.raises(DamagedFile, match="quantization_config must be a JSON object"):
        load_packed(folder)


@pytest.mark.parametrize("way", damaging.WAYS)
def test_packed_weights_are_checked_alike(folder: Path, way: str) -> None:
    config = folder / "config.json"
    packed = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": packed}))
    file = min(folder.glob("*.safetensors"))

    damaging.WAYS[way](file)

    with pytest.raises(DamagedFile) as raised:
        load_packed(folder)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("state", [b"", b"{}", b"[" * 9000, b"\xff", b'{"quant_type": "nf4"}'])
def test_what_is_stored_of_a_packed_weight_is_checked(folder: Path, state: bytes) -> None:
    config = folder / "config.json"
    packed = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": packed}))
    file = min(folder.glob("*.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight"
    stored = torch.tensor(list(state), dtype=torch.uint8)
    tensors = {**load_file(file), f"{name}.quant_state.bitsandbytes__nf4": stored}
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=f"what is stored of the weight {name}"):
        load_packed(folder)


TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
TEMPLATES = ["chat_template.jinja", "additional_chat_templates/rag.jinja"]


@pytest.mark.parametrize("way", [way for way in damaging.WAYS if way != "cut"])
@pytest.mark.parametrize("name", [*TOKENIZER_FILES, *TEMPLATES])
def test_each_damage_of_a_tokenizer_is_named(tmp_path: Path, name: str, way: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")

    damaging.WAYS[way](file)

    with pytest.raises(DamagedFile) as raised:
        check_tokenizer(tmp_path)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("way", ["empty", "html", "pointer", "folder", "link to nothing"])
@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"])
def test_vocabularies_of_other_forms_are_checked_for_their_kind(tmp_path: Path, name: str, way: str) -> None:
    (tmp_path / name).write_text("a")

    damaging.WAYS[way](tmp_path / name)

    with pytest.raises(DamagedFile) as raised:
        check_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(raised.value)
