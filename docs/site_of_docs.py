"""What the site has that no page says itself: options of commands, links to sources, and the list for programs."""

from __future__ import annotations

import re
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

from rp_cli.arguments import COMMANDS, Command
from rp_cli.options.declared import Option, declared

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_SPECIAL = re.compile(r"[*<|_]")
OPTIONS = "<!-- the options of each command -->"
VERSIONS = "<!-- the version of each package -->"
_ROOT = Path(__file__).parents[1]
_PACKAGES = _ROOT / "packages"
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def repository() -> str:
    """The address of the public repository, as releases have it; empty while there is none."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["roundpipe"]["repository"]


def repository_links(address: str) -> dict[str, Any]:
    """Options of the theme: a link to the repository, and to each page's source; none without an address."""
    if not address:
        return {}
    return {
        "source_view_link": f"{address}/blob/main/docs/{{filename}}",
        "source_edit_link": f"{address}/edit/main/docs/{{filename}}",
        "footer_icons": [{"name": "Repository", "url": address, "html": "Repository", "class": ""}],
    }


def commands() -> str:
    """Sections of the page of commands: each command's description, and tables of its options."""
    return "\n\n".join(f"## roundpipe {name}\n\n{_described(command)}" for name, command in COMMANDS.items())


def versions() -> str:
    """A table of the packages: their versions, whether there are changes since, and where these are told."""
    rows = [_version_row(path.parent, path.read_text(encoding="utf-8")) for path in _changelogs()]
    return "\n".join(["| package | version | since then | Python |", "|---|---|---|---|", *rows])


def _changelogs() -> list[Path]:
    return sorted(_PACKAGES.glob("*/CHANGELOG.md"))


def _version_row(package: Path, changes: str) -> str:
    (module,) = (path for path in package.glob("src/*/__init__.py"))
    (version,) = _VERSION.findall(module.read_text(encoding="utf-8"))
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    new = changes.partition("## Unreleased")[2].partition("\n## ")[0].count("\n- ")
    told = f"{new} change{'' if new == 1 else 's'}" if new else "nothing"
    return f"| {package.name} | {version} | {told} | {project['requires-python'].removeprefix('>=')} or newer |"


def _described(command: Command) -> str:
    options = sorted(declared(command.options).values(), key=lambda option: option.group)
    tables = [_table(group, list(own)) for group, own in groupby(options, lambda option: option.group)]
    return "\n\n".join([_escaped(command.description), *tables])


def _table(group: str, options: list[Option]) -> str:
    head = f"| {group or 'option'} | |\n|---|---|\n"
    return head + "\n".join(f"| `{_form(option)}` | {_escaped(option.told)} |" for option in options)


def _form(option: Option) -> str:
    takes = {"values": f" {option.kind.metavar} ...", "value": f" {option.kind.metavar}"}
    value = "" if option.is_positional else takes.get(option.kind.takes, "")
    return (option.flag + value).replace("|", "\\|")


def _escaped(text: str) -> str:
    """As Markdown that shows the text."""
    parts = text.split("`")
    # Every other part is code; the names of options become code, too, since two dashes would become one.
    parts[::2] = [_FLAG.sub(r"`\g<0>`", _SPECIAL.sub(r"\\\g<0>", part)) for part in parts[::2]]
    return "`".join(parts)


def write_list(app: Any, error: Exception | None) -> None:
    """Write ``llms.txt``: each page's title, and the place of its source, which the site has beside the page."""
    if error is None and app.builder.name == "html":
        titles = {name: title.astext() for name, title in app.env.titles.items()}
        lines = [f"- [{titles[name]}](_sources/{name}.md.txt)" for name in _ordered(app, titles)]
        text = "\n".join(
            ["# RoundPipe", "", "> Trains large models on the GPUs you own.", "", "## Pages", "", *lines]
        )
        Path(app.outdir, "llms.txt").write_text(f"{text}\n", encoding="utf-8")


def _ordered(app: Any, titles: dict[str, str]) -> list[str]:
    """The pages in the order of the site's table of contents."""
    found = [app.config.root_doc]
    for name in found:
        found += [page for page in app.env.toctree_includes.get(name, []) if page in titles and page not in found]
    return found
