"""Damaged files of a model's folder: `train` and `plan` name each in one line, with status 2."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import finetuning
import pytest
from roundpipe import from_pretrained
from rp_cli.main import main
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "rp_presets"))

import damaging

pytestmark = pytest.mark.usefixtures("measured_once")
GOOD = ["--sequence", "24", "--batch", "2", "--num-microbatch", "1", "--steps", "1", "--devices", "cpu:1"]
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, and conversations."""
    folder = tmp_path_factory.mktemp("place")
    finetuning.make_model(folder / "whole")
    finetuning.json_lines(folder / "chats.jsonl", finetuning.chats())
    return folder


@pytest.fixture
def model(place: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(place / "whole", tmp_path / "model"))


def trained(place: Path, model: Path, *more: str) -> int:
    data = str(place / "chats.jsonl")
    return main(
        ["train", "--model", str(model), "--data", data, "--output", str(model.parent / "run"), *GOOD, *more]
    )


def assert_one_line(capsys: pytest.CaptureFixture[str], named: Path) -> str:
    shown = capsys.readouterr()
    assert shown.err.startswith("roundpipe: "), shown.err
    assert shown.err.count("\n") == 1, shown.err
    assert str(named) in shown.err
    return shown.err


@pytest.mark.few(1)
@pytest.mark.parametrize("way", damaging.WAYS)
@pytest.mark.parametrize("name", FILES)
def test_training_names_each_damage_of_each_file(
    place: Path, model: Path, name: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaging.WAYS[way](model / name)

    assert trained(place, model) == 2

    # A template that was cut is found when it is used.
    is_cut = (name, way) == ("chat_template.jinja", "cut")
    told = assert_one_line(capsys, model if is_cut or (name, way) == ("config.json", "folder") else model / name)
    assert not (model.parent / "run").exists()
    if way == "pointer":
        assert "git lfs pull" in told


@pytest.mark.parametrize("way", damaging.WAYS)
def test_planning_names_each_damage_of_a_configuration(
    model: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaging.WAYS[way](model / "config.json")

    assert main(["plan", "--model", str(model), "--gpu", "H100", "--ram", "64GB"]) == 2

    assert_one_line(capsys, model / "config.json")


@pytest.mark.parametrize("way", damaging.WAYS)
def test_a_resumed_run_names_damage_as_a_new_one(
    place: Path, model: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = model.parent / "run"
    run.mkdir()
    # Of a run whose training was not finished.
    (run / "options.json").write_text('{"roundpipe_version": "0"}')
    damaging.WAYS[way](model / "model.safetensors")

    assert trained(place, model, "--resume") == 2

    assert_one_line(capsys, model / "model.safetensors")


def test_weights_of_another_vocabulary_are_told_in_one_line(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model / "model.safetensors"
    weights = {name: value[:-3] if "lm_head" in name else value for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})

    assert trained(place, model) == 2

    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{model} do not fit its config.json: lm_head.weight has the shape [157, 32], not [160, 32]" in told


@pytest.mark.parametrize("given", [{"tool_use": finetuning.CHATML, "rag": finetuning.CHATML}, {"rag": "messages"}])
def test_named_templates_need_a_default(
    place: Path, model: Path, given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "chat_template.jinja").unlink()
    tokenizer: Any = finetuning.tokenizer()
    tokenizer.chat_template = given
    tokenizer.save_pretrained(model)

    assert trained(place, model) == 2

    told = capsys.readouterr().err
    assert f"chat templates, {', '.join(sorted(given))}, none is named default; give --tokenizer" in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_the_default_among_named_templates_is_used(place: Path, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    tokenizer: Any = finetuning.tokenizer()
    tokenizer.chat_template = {"default": finetuning.CHATML, "rag": finetuning.CHATML}
    tokenizer.save_pretrained(model)

    assert trained(place, model) == 0


@pytest.mark.parametrize("way", damaging.WAYS)
def test_the_library_has_the_same_words(
    place: Path, model: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaging.WAYS[way](model / "model.safetensors")

    with pytest.raises(ValueError, match=r"model\.safetensors") as raised:
        from_pretrained(model)

    assert trained(place, model) == 2
    assert str(raised.value) in capsys.readouterr().err


def test_each_file_of_the_folder_is_one_that_is_damaged_here(model: Path) -> None:
    assert sorted(path.name for path in model.iterdir()) == sorted(FILES)
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
