"""Notebooks, pictures and recipes' pages are what their scripts make of examples, tables and recipes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from types import ModuleType

import pytest
from pages import ROOT
from rp_cli.recipes.catalogue import recipes


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def test_notebooks_are_those_of_the_examples() -> None:
    expected = script("notebooks").notebooks()
    assert {path.name for path in expected} == {"full_finetuning.ipynb", "lora.ipynb"}
    assert {path: path.read_text() for path in (ROOT / "examples").glob("*.ipynb")} == expected


RECIPES = script("recipe-pages")


def test_each_recipe_has_its_page() -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/recipes").glob("*.md")}

    assert pages == {
        name: RECIPES.page_of(recipe, RECIPES.answer_in(pages[name])) for name, recipe in recipes().items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", recipes())
def test_plan_answers_what_a_recipes_page_says(name: str) -> None:
    page = (ROOT / f"docs/recipes/{name}.md").read_text()

    assert RECIPES.answer_in(page) == RECIPES.answer_to(recipes()[name])


@pytest.mark.slow
@pytest.mark.usefixtures("default")
def test_a_notebook_runs_cell_by_cell() -> None:
    cells = json.loads((ROOT / "examples/lora.ipynb").read_text())["cells"]
    names = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("name", ["memory", "scaling"])
def test_a_picture_shows_what_is_so_now(name: str) -> None:
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == script("pictures").DRAWN[name]()


def test_the_timeline_has_every_task_of_two_devices() -> None:
    drawn = (ROOT / "docs/pictures/call.svg").read_text()
    for task in ("F[0:3]", "F[3:6]", "FB[6:8]", "B[4:6]", "B[2:4]", "B[0:2]"):
        for microbatch in range(4):
            assert f"<title>{task} m{microbatch}: " in drawn
