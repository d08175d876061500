"""`roundpipe export`: files of others' formats have the model's values; and what the hub is sent."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from finetuning import VOCABULARY, WORDS, make_model
from hub_server import serving
from peft import LoraConfig, PeftModel, get_peft_model
from rp_cli.main import main
from rp_export.formats.gguf_check import check_model
from rp_trainer.errors import Unwritable
from transformers import AutoModelForCausalLM

IDS = torch.arange(12)[None]
# A checkout of llama.cpp; the source package of llama-cpp-python has one, in vendor/llama.cpp.
CHECKOUT = os.environ.get("ROUNDPIPE_LLAMA_CPP", "")
needs_llama_cpp = pytest.mark.skipif(not CHECKOUT, reason="ROUNDPIPE_LLAMA_CPP names no checkout of llama.cpp")


def with_pieces(folder: Path, family: str) -> Path:
    """A tiny model whose tokenizer llama.cpp knows: it knows others by what they make of a long text."""
    make_model(folder, family)
    (folder / "tokenizer.json").unlink()
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 50),
        model_writer=made,
        vocab_size=VOCABULARY // 2,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    return folder


def adapter_for(base: Path, folder: Path, **more: Any) -> Path:
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"], **more)
    torch.manual_seed(1)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def export(run: Path, output: Path, form: str, *more: str) -> int:
    return main(["export", str(run), "--format", form, "--output", str(output), *more])


def tensors(file: Path) -> dict[str, Any]:
    return {
        one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(str(file)).tensors
    }


def test_safetensors_are_the_merged_model(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter")

    assert export(adapter, tmp_path / "made", "safetensors") == 0
    assert export(base, tmp_path / "whole", "safetensors") == 0

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    torch.testing.assert_close(found(IDS).logits, adapted(IDS).logits, rtol=0, atol=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert all(torch.equal(one, whole[name]) for name, one in plain.items())


def written(model: Path, file: Path, kind: Any = gguf.GGMLQuantizationType.F32, **changed: Any) -> Path:
    """A GGUF file by gguf's own writer, with llama.cpp's order of rotary rows. `changed`: by tensor."""
    state = AutoModelForCausalLM.from_pretrained(model).state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(8)
    for name, value in state.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        array = value.float().numpy()
        if name.endswith("q_proj.weight"):
            array = array.reshape(4, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        array = changed.get(target.replace(".", "_"), lambda same: same)(array)
        if array is not None:
            # Blocks of eight bits have 32 numbers; norms stay as they are.
            own = gguf.GGMLQuantizationType.F32 if array.ndim == 1 or array.shape[1] % 32 else kind
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(array), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_values_that_are_rounded_to_a_files_type_are_the_models(tmp_path: Path, kind: str) -> None:
    base = make_model(tmp_path / "base", "llama")

    file = written(base, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])

    assert "tensors are the model's, " in check_model(file, base)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda array: array + 0.01 * (np.arange(array.size).reshape(array.shape) == 3), "differ"),
        (lambda array: array[:-1], "differ"),
        (lambda _: None, r"\(missing\) differ"),
    ],
    ids=["another value", "fewer rows", "no tensor"],
)
def test_a_file_with_other_values_is_told_by_the_tensors_name(tmp_path: Path, change: Any, what: str) -> None:
    base = make_model(tmp_path / "base", "llama")

    file = written(base, tmp_path / "model.gguf", blk_0_ffn_up_weight=change)

    with pytest.raises(Unwritable, match=rf"blk\.0\.ffn_up\.weight {what}"):
        check_model(file, base)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_gguf_file_has_the_merged_models_values(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = with_pieces(tmp_path / "base", family)
    adapter = adapter_for(base, tmp_path / "adapter")

    assert export(adapter, tmp_path / "made", "gguf", "--type", "f32") == 0

    assert "tensors are the model's" in capsys.readouterr().out
    found = tensors(tmp_path / "made" / "model.gguf")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    model = adapted.merge_and_unload()
    for at, layer in enumerate(model.model.layers):
        query = layer.self_attn.q_proj.weight.detach().numpy()
        if family == "llama":
            # Halves of rotary embeddings beside each other, as llama.cpp has them.
            query = query.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        assert np.array_equal(found[f"blk.{at}.attn_q.weight"], query)
        for name, own in (("ffn_down", layer.mlp.down_proj), ("ffn_up", layer.mlp.up_proj)):
            assert np.array_equal(found[f"blk.{at}.{name}.weight"], own.weight.detach().numpy())
    assert np.array_equal(found["token_embd.weight"], model.model.embed_tokens.weight.detach().numpy())
    # A value that changes is found, and a tensor that is not there.
    export(adapter, tmp_path / "merged", "safetensors")
    changed: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    changed.model.layers[0].mlp.up_proj.weight.data[3, 2] += 0.01
    changed.save_pretrained(tmp_path / "merged")
    with pytest.raises(Unwritable, match=r"blk\.0\.ffn_up\.weight differ"):
        check_model(tmp_path / "made" / "model.gguf", tmp_path / "merged")


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_rounding_to_fewer_bits_is_no_difference(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = with_pieces(tmp_path / "base", "gemma2")

    assert export(base, tmp_path / "made", "gguf", "--type", kind) == 0

    assert "tensors are the model's" in capsys.readouterr().out


@needs_llama_cpp
@pytest.mark.slow
def test_an_adapter_becomes_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = with_pieces(tmp_path / "base", "qwen3")
    adapter = adapter_for(base, tmp_path / "adapter")

    assert export(adapter, tmp_path / "made", "gguf", "--adapter-only", "--type", "f32") == 0

    assert "8 tensors are the adapter's" in capsys.readouterr().out
    found = tensors(tmp_path / "made" / "adapter.gguf")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    layer = adapted.base_model.model.model.layers[1].mlp.down_proj
    assert np.array_equal(found["blk.1.ffn_down.weight.lora_b"], layer.lora_B["default"].weight.detach().numpy())


@needs_llama_cpp
@pytest.mark.slow
def test_what_llama_cpp_cannot_convert_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(make_model(tmp_path / "base"), tmp_path / "made", "gguf") == 1

    assert "convert_hf_to_gguf.py of llama.cpp cannot convert the model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_what_is_missing_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROUNDPIPE_LLAMA_CPP", raising=False)
    base = make_model(tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", use_rslora=True)
    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (checkout / name).touch()

    def told(*arguments: str) -> str:
        assert main(["export", *arguments, "--output", str(tmp_path / "made")]) == 2
        return capsys.readouterr().err

    assert "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in told(str(base), "--format", "gguf")
    assert "has no convert_hf_to_gguf.py" in told(str(base), "--format", "gguf", "--llama-cpp", str(tmp_path))
    of_gguf = ["--format", "gguf", "--llama-cpp", str(checkout), "--adapter-only"]
    assert "holds a whole model, and no adapter" in told(str(base), *of_gguf)
    assert "a GGUF file holds plain LoRA, but the adapter has use_rslora" in told(str(adapter), *of_gguf)
    assert "are for --format gguf, but the format is safetensors" in told(str(base), "--type", "f16")
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install mlx-lm" in told(str(base), "--format", "mlx")
    assert "pip install 'rp-cli[gguf]'" in told(str(base), "--format", "gguf")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("is_allowed", [True, False])
def test_what_is_pushed_is_the_folder(
    tmp_path: Path, is_allowed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, uploaded = make_model(tmp_path / "base"), tmp_path / "uploaded"
    with serving({}, uploaded if is_allowed else None) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.endpoint, raising=False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")

        code = export(base, tmp_path / "made", "safetensors", "--push", "me/mine", "--private")

    printed = capsys.readouterr()
    made = {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()}
    if is_allowed:
        assert code == 0, printed.err
        assert {file.name: file.read_bytes() for file in uploaded.iterdir()} == made
        assert (hub.made[0]["name"], hub.made[0]["organization"]) == ("mine", "me")
        assert hub.made[0].get("private") or hub.made[0].get("visibility") == "private"
        assert f"pushed to {hub.endpoint}/me/mine" in printed.out
    else:
        assert code == 1
        assert "--push me/mine: the hub does not take it" in printed.err
        assert "model.safetensors" in made


def test_a_folder_of_a_run_has_no_place_of_this_machine(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")

    assert export(base, tmp_path / "made", "safetensors") == 0

    assert str(tmp_path) not in (tmp_path / "made" / "README.md").read_text()
    assert "_name_or_path" not in json.loads((tmp_path / "made" / "config.json").read_text())
