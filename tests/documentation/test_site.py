"""The site has each option of the command line, each name of `roundpipe`, and links where there is an address."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest
import roundpipe
from pages import ROOT
from rp_cli.arguments import COMMANDS
from rp_cli.main import main


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs/site_of_docs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_that_help_tells_of_is_on_the_page(
    name: str, site: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    told = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--schema"}
    section = site.commands().partition(f"## roundpipe {name}\n")[2].partition("\n## ")[0]

    assert told
    assert told <= set(re.findall(r"--[a-z0-9-]+", section))


def test_the_page_asks_for_the_options(site: ModuleType) -> None:
    assert site.OPTIONS in (ROOT / "docs/commands.md").read_text()


def test_the_page_of_changes_has_each_package_with_its_version(site: ModuleType) -> None:
    page = (ROOT / "docs/changes.md").read_text()
    rows = [[*map(str.strip, line.split("|")[1:-1])] for line in site.versions().splitlines()[2:]]

    assert site.VERSIONS in page
    assert [row[0] for row in rows] == sorted(path.name for path in (ROOT / "packages").iterdir())
    assert all(f"../packages/{row[0]}/CHANGELOG.md" in page for row in rows)
    versions = {row[0]: row[1] for row in rows}
    assert versions["rp-cli"] == importlib.import_module("rp_cli").__version__
    assert all("change" in row[2] or row[2] == "nothing" for row in rows)


def test_links_to_the_repository_are_those_of_releases_and_absent_without_an_address(site: ModuleType) -> None:
    (setting,) = re.findall(r'^repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    links = site.repository_links("https://example.org/name")

    assert site.repository() == setting
    assert site.repository_links("") == {}
    assert links["source_view_link"].format(filename="start.md") == (
        "https://example.org/name/blob/main/docs/start.md"
    )
    assert [icon["url"] for icon in links["footer_icons"]] == ["https://example.org/name"]


def test_a_help_text_is_shown_as_it_is(site: ModuleType) -> None:
    assert site._escaped("a|b of *x*, --lora-bias `--c d`") == r"a\|b of \*x\*, `--lora-bias` `--c d`"


def test_the_reference_has_each_name_of_the_engine_once_and_errors_last() -> None:
    text = (ROOT / "docs/reference/roundpipe.md").read_text()
    kinds, names = zip(
        *re.findall(r"^\.\. auto(class|exception|function):: (\w+)$", text, re.MULTILINE), strict=True
    )

    assert sorted(names) == sorted(set(roundpipe.__all__) - {"optim"})
    assert "exception" not in kinds[: len(kinds) - kinds.count("exception")]
