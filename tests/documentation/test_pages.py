"""The code of the pages for users runs."""

from __future__ import annotations

import pytest
from pages import ROOT, blocks, compiled_only, run

PAGES = ["start.md", *(f"how-to/{path.name}" for path in sorted((ROOT / "docs/how-to").glob("*.md")))]

pytestmark = pytest.mark.filterwarnings("ignore:.*parts were requested")


@pytest.mark.few(3)
@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str) -> None:
    if page == "how-to/lightning.md":
        pytest.importorskip("lightning")
    run((ROOT / "docs" / page).read_text(), page)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_code_that_runs(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert blocks(text)
    # What is not run is there only where the other side of a migration is not installed.
    assert not compiled_only(text, page) or page in ("how-to/migrate-deepspeed.md", "how-to/migrate-fsdp.md")


def test_an_error_names_the_line_of_the_page() -> None:
    page = "# Title\n\n<!-- run\nx = 1\n-->\n\n```python\ny = x + 1\nassert y == 3\n```\n"
    with pytest.raises(AssertionError) as caught:
        run(page)
    assert caught.tb.tb_next.tb_next.tb_lineno == 9


def test_only_python_runs() -> None:
    assert run("```py\nx = 1\n```\n```console\n$ ls\n```\n```python\ny = 1\n```\n").keys() >= {"y"}
    with pytest.raises(SyntaxError):
        compiled_only("```py\nx = \n```\n")


def test_every_package_has_a_page_of_the_reference() -> None:
    packages = {path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py")}
    assert {path.stem for path in (ROOT / "docs/reference").glob("*.md")} == {"index", *packages}
