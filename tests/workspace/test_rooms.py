"""The house: few files a folder, and no circle of imports between files, imports for types included."""

from __future__ import annotations

import graphlib
from collections import Counter
from pathlib import Path

import grimp
import pytest

SOURCES = Path(__file__).parents[2] / "packages"
PACKAGES = sorted(path.name for path in SOURCES.glob("*/src/*") if (path / "py.typed").is_file())
MOST_FILES = 12


def test_no_folder_has_more_files_than_one_can_keep_in_mind() -> None:
    folders = Counter(path.parent for path in SOURCES.glob("*/src/**/*.py"))
    assert len(folders) > 20
    assert {str(folder): count for folder, count in folders.items() if count > MOST_FILES} == {}


def imports(package: str) -> dict[str, set[str]]:
    graph = grimp.build_graph(package, include_external_packages=False, exclude_type_checking_imports=False)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_itself_through_others(package: str) -> None:
    graphlib.TopologicalSorter(imports(package)).prepare()


def test_a_circle_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "circular_house"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("import circular_house.two\n")
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import circular_house.one\n"
    (folder / "two.py").write_text(guarded)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports("circular_house")).prepare()
