"""The card of a model: what it was made of, with which options and data, and how its loss fell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import yaml
from rp_sources.models import called, repository_of
from rp_sources.sources import Source

from rp_export.whole import ExportedModel

_CARD = "README.md"
_METRICS = "metrics.jsonl"
_PACKAGES = ("rp-cli", "rp-core", "torch", "transformers", "peft")
# Facts that options.json has beside the options.
_DIGEST = "data_digest"


@dataclass(frozen=True, slots=True)
class CardContent:
    """What a card is about. `how`: a word. `whole`: the weights, if they were written anew.

    `options`: of the run, as a file for ``--config`` has them, without what is of a machine; empty to omit them.
    """

    how: str
    source: Source
    whole: ExportedModel | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def write_card(folder: Path, content: CardContent) -> None:
    """Write the card of a model, ``README.md``. Raises `OSError`."""
    head = yaml.safe_dump(_head(content), sort_keys=False)
    (folder / _CARD).write_text(f"---\n{head}---\n\n" + "\n".join(_body(content)) + "\n", encoding="utf-8")


def _head(content: CardContent) -> dict[str, Any]:
    base = repository_of(content.source.model)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["roundpipe", content.how]}
    return head if base is None else {**head, "base_model": base}


def _body(content: CardContent) -> Iterator[str]:
    name = called(content.source.model)
    yield f"# {name}, trained with RoundPipe" if content.source.run else f"# {name}"
    yield ""
    if content.whole is not None and content.whole.adapter:
        yield (
            f"A {content.whole.adapter} adapter is merged into {content.whole.changed} of "
            f"{content.whole.weights} weights, in {', '.join(content.whole.dtypes)}."
        )
    recipe = content.source.recipe
    if recipe:
        yield from _of_run(content, recipe)
    yield from ("", "## Versions", "")
    yield from (f"- {package} {number}" for package, number in _versions())


def _of_run(content: CardContent, recipe: Mapping[str, Any]) -> Iterator[str]:
    if content.options:
        told = yaml.safe_dump(dict(content.options), sort_keys=False).splitlines()
        yield from ("", "## Recipe", "", "```yaml", *told, "```")
    yield from ("", "## Data", "")
    for name in ("data", "eval_data"):
        yield from (f"- {name.replace('_', ' ')}: {without_folders(path)}" for path in recipe.get(name) or ())
    yield f"- SHA-256 of the tokens: {recipe.get(_DIGEST, 'unknown')}"
    losses = list(_losses(content.source.run))
    if losses:
        yield from ("", "## Losses", "", *losses)


def without_folders(value: Any) -> Any:
    """Return the last part of a path, or of those after ``disk:``: the others are of a machine."""
    if isinstance(value, str) and value.startswith("disk:"):
        return f"disk:{','.join(Path(one).name for one in value.removeprefix('disk:').split(','))}"
    return (
        [without_folders(one) for one in cast("list[Any]", value)]
        if isinstance(value, list)
        else Path(str(value)).name
    )


def _losses(run: Path | None) -> Iterator[str]:
    if run is None or not (run / _METRICS).is_file():
        return
    rows = [json.loads(line) for line in (run / _METRICS).read_text(encoding="utf-8").splitlines() if line]
    for name, word in (("loss", "training loss"), ("held_out_loss", "held-out loss")):
        found = [(row["step"], row[name]) for row in rows if row.get(name) is not None and "step" in row]
        if found:
            (first, before), (last, after) = found[0], found[-1]
            yield f"- {word}: {before:.4f} at step {first}, {after:.4f} at step {last}"


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
