"""Each recipe fits the machine that it names, can be trained by, and is listed where it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rp_cli.finetune.options import FineTuning
from rp_cli.main import main
from rp_cli.options.config_file import with_config
from rp_cli.options.declared import GivenOptions, declared, read
from rp_cli.recipes.catalogue import recipes
from rp_trainer.errors import Refused
from sometimes import one_in

NAMES = sorted(recipes())
# The slowest link of the cards with this memory.
CARD = "RTX 3090"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def options_of(name: str, **given: Any) -> FineTuning:
    usual = {"data": ["a.jsonl"], "output": "run", "config": f"recipe:{name}"}
    return read(FineTuning, with_config(GivenOptions(**usual, **given), declared(FineTuning)))


@pytest.mark.later
@pytest.mark.parametrize("name", one_in(5, NAMES))
def test_a_recipe_fits_the_machine_that_it_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipes()[name]
    machine = ("--gpu", CARD, "--devices", str(recipe.devices), "--ram", f"{recipe.ram_gb}GB")

    answer = json.loads(told(capsys, "plan", "--config", f"recipe:{name}", *machine, "--json"))

    assert answer["fits"]
    needed = answer["host_bytes"]["total"] + answer["host_bytes"]["kept_free"]
    # Sizes that memory is sold in, but no larger one than needed.
    assert 0.5 < needed / (recipe.ram_gb * 10**9) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_configuration_of_the_trainer(name: str) -> None:
    options = options_of(name)

    assert str(options.model).count("/") == 1
    assert options.sequence == 2048
    # Of a model of the same name.
    model = options.model.name.lower()
    assert model.startswith(recipes()[name].configuration.parent.name)


def test_there_are_recipes_for_what_people_have() -> None:
    known = [options_of(name) for name in NAMES]

    assert len(known) >= 12
    assert {recipes()[name].devices for name in NAMES if name.startswith("qwen3-8b-full")} == {1, 4, 8}
    assert {one.sync for one in known} == {True, False}
    assert {one.pack for one in known} >= {None, "nf4", "stored"}


def test_other_options_count_before_those_of_a_recipe() -> None:
    options = options_of("qwen3-8b-lora-1x24gb", batch="3", model="mine")

    assert (options.batch, options.model, options.lora) == (3, Path("mine"), 16)


def test_recipes_are_listed_where_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "recipes", "--gpu", "RTX 4090", "--ram", "64GB")

    names = [line.split()[0] for line in shown.splitlines()[1:-1]]
    assert "qwen3-8b-full-1x24gb" in names
    assert not {"qwen3-8b-full-1x24gb-exact", "qwen3-8b-full-4x24gb", "gpt-oss-120b-lora-1x24gb"} & {*names}
    assert shown.startswith(f"{len(names)} of {len(NAMES)} recipes fit this: 1 x RTX 4090, 64 GB of RAM")
    more = json.loads(told(capsys, "recipes", "--gpu", "RTX 4090", "--devices", "8", "--ram", "1TB", "--json"))
    assert [one["name"] for one in more] == NAMES
    assert told(capsys, "recipes", "--gpu", "RTX 4080", "--ram", "1TB").startswith("0 of")


def test_a_machine_without_gpus_has_no_recipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert "recipes fit this: no GPU, " in told(capsys, "recipes")
    everything = json.loads(told(capsys, "recipes", "--all", "--json"))
    assert [one["fits"] for one in everything] == [False] * len(NAMES)


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "recipe:qwen3-8b-full-2x24gb", "--data", "a", "--output", "b"]) == 2
    assert "the nearest one is qwen3-8b-full-" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_passes_over_options_that_only_training_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = recipes()["qwen3-1.7b-full"].configuration
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {model}\nsequence: 64\nbatch: 2\nlr: 1e-3\ndevices: cuda:0\nlora: 4\n")

    answer = json.loads(told(capsys, "plan", "--config", str(file), "--gpu", CARD, "--batch", "1", "--json"))

    assert (answer["batch"], answer["sequence"], answer["machine"]["devices"]) == (1, 64, 1)
    assert answer["model"]["trained_parameters"] < answer["model"]["parameters"] / 10


def test_a_name_that_training_lacks_is_refused_in_a_plan_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("squence: 64\n")
    given = GivenOptions(config=str(file), command="plan")

    with pytest.raises(Refused, match="the nearest one is 'sequence'"):
        with_config(given, {}, declared(FineTuning))


def test_the_page_of_recipes_has_each_with_its_needs() -> None:
    page = Path(__file__).parents[2].joinpath("docs/recipes.md").read_text()

    rows = [line for line in page.splitlines() if line.startswith("| [`")]
    wanted = [
        (name, f"{one.devices} of {one.device_gb} GB", f"{one.ram_gb} GB") for name, one in recipes().items()
    ]
    assert [(row.split("`")[1], *map(str.strip, row.split("|")[3:5])) for row in rows] == wanted
    assert all(f"](recipes/{name}.md) |" in page for name in recipes())
