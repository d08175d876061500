"""Loading: what transformers loads from safetensors files; anything else is refused at the call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rp_presets import load_pretrained
from safetensors.torch import save_file
from tiny_models import SMALL, untied
from transformers import AutoModel, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, LlamaModel


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    untied().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_it_is_what_transformers_loads(checkpoint: Path) -> None:
    found, wanted = load_pretrained(checkpoint), LlamaForCausalLM.from_pretrained(checkpoint)
    assert type(found) is LlamaForCausalLM
    assert not found.training
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.state_dict().items())


def test_weights_stay_mapped(checkpoint: Path) -> None:
    model = load_pretrained(str(checkpoint), LlamaModel)
    file = checkpoint / "model.safetensors"
    assert str(file) in Path("/proc/self/maps").read_text()
    del model
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_options_are_those_of_transformers(checkpoint: Path) -> None:
    os.rename(checkpoint, checkpoint.parent / "inside")
    model = load_pretrained(
        checkpoint.parent, AutoModel, subfolder="inside", dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert type(model) is LlamaModel
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": "auto"}, "device_map is not supported: weights stay in host memory"),
        ({"tp_plan": "auto"}, "tp_plan is not supported: weights stay in host memory"),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "quantization_config is not supported"),
        ({"load_in_4bit": True}, "load_in_4bit is not supported: weights are not quantized"),
        ({"gguf_file": "a.gguf"}, "gguf_file is not supported: only safetensors are read"),
        ({"state_dict": {}}, "state_dict is not supported: only safetensors are read"),
        ({"use_safetensors": False}, "use_safetensors=False is not supported"),
        ({"disable_mmap": True}, "disable_mmap is not supported: without memory mapping"),
        ({"output_loading_info": True}, "output_loading_info is not supported: missing and unexpected keys"),
        (
            {"config": LlamaConfig(**SMALL, quantization_config={"bits": 4})},
            "the config has a quantization_config",
        ),
    ],
)
def test_what_maps_no_files_is_refused(checkpoint: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_pretrained(checkpoint, **options)


def test_options_that_ask_for_nothing_are_taken(checkpoint: Path) -> None:
    options = {"device_map": None, "use_safetensors": True, "disable_mmap": False, "output_loading_info": False}
    assert load_pretrained(checkpoint, **options).config.hidden_size == 16


def test_a_wrong_path_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path / "none", "Qwen/Qwen3-0.6B", __file__):
        with pytest.raises(NotADirectoryError, match="must be a local directory with a checkpoint") as raised:
            load_pretrained(wrong)
        assert str(wrong) in str(raised.value)


def test_a_directory_without_safetensors_is_refused(checkpoint: Path) -> None:
    state = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    (checkpoint / "model.safetensors").unlink()
    torch.save(state, checkpoint / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="has no safetensors files; convert the checkpoint: load it"):
        load_pretrained(checkpoint)
    # Files of another name, beside a pickle that transformers would take.
    save_file({"other": torch.zeros(1)}, checkpoint / "other.safetensors")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        load_pretrained(checkpoint)


def test_a_quantized_checkpoint_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(
        ValueError, match=r"is quantized according to its config\.json: pass pack='stored' to roundpipe"
    ):
        load_pretrained(checkpoint)


def test_a_directory_of_an_adapter_is_refused(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter: load the directory of its base model"):
        load_pretrained(checkpoint)


def test_a_model_class_that_cannot_load_is_refused(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="model_class must be a class of transformers with from_pretrained"):
        load_pretrained(checkpoint, torch.nn.Linear)


@pytest.mark.parametrize("before", [None, "0"])
def test_the_environment_is_as_it_was(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    during: list[str | None] = []

    class Model(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            during.append(os.environ.get(name))

    load_pretrained(checkpoint, Model)
    with pytest.raises(TypeError):
        load_pretrained(checkpoint, Model, no_such_option=1)
    assert during == ["1"]
    assert os.environ.get(name) == before
