"""Options of `roundpipe train` in a YAML file, by the names that they have on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from roundpipe.cli.errors import Refused
from roundpipe.cli.options import EITHER, Given

# Those that a file has no use for.
_NOT_HERE = frozenset({"command", "json", "config"})


def with_config(given: Given, known: Mapping[str, str]) -> Given:
    """The options with those of the file ``--config`` added; what the command line has counts first.

    So do options of which only one may be given: ``--steps`` counts instead of ``epochs`` in the file.

    Args:
        known: what each option of the command takes: ``"value"``, ``"values"`` or ``"flag"``, by its name.

    Raises `Refused` for a file that cannot be read, an unknown name (with a known one that is near, if any), and a
    value of another kind.
    """
    if given.config is None:
        return given
    path = Path(given.config)
    found = {name: _value(path, name, value, known[name]) for name, value in _named(path, known).items()}
    others = {other for pair in EITHER for one, other in (pair, pair[::-1]) if one in vars(given)}
    kept = {name: value for name, value in found.items() if name not in others}
    return Given(**{**kept, **vars(given)})


def _named(path: Path, known: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _content(path).items():
        name = str(key).replace("-", "_")
        if name not in known or name in _NOT_HERE:
            names = [one.replace("_", "-") for one in known if one not in _NOT_HERE]
            nearest = difflib.get_close_matches(str(key).replace("_", "-"), names, n=1)
            hint = f"the nearest one is {nearest[0]!r}" if nearest else "`roundpipe train --help` lists them"
            raise Refused(f"--config {path} has an unknown option {key!r}; {hint}")
        if name in found:
            raise Refused(f"--config {path} has {key!r} twice")
        found[name] = value
    return found


def _content(path: Path) -> Mapping[Any, Any]:
    import yaml  # pyright: ignore[reportMissingModuleSource] - it has no types of its own

    loader: Any = yaml
    try:
        content: object = loader.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"--config {path} cannot be read ({error.strerror})") from error
    except (loader.YAMLError, ValueError, RecursionError) as error:
        raise Refused(f"--config {path} must be YAML, but is not: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Refused(
            f"--config {path} must have options and their values, such as 'batch: 8', but has a {content!r:.40}"
        )
    return cast("Mapping[Any, Any]", content)


def _value(path: Path, name: str, value: object, kind: str) -> Any:
    """The text that the command line would have."""
    told = f"--config {path}: {name.replace('_', '-')} must be"
    if kind == "flag":
        if not isinstance(value, bool):
            raise Refused(f"{told} true or false, but is {value!r}")
        return value
    if kind == "values":
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        return [_text(told, item) for item in items]
    return _text(told, value)


def _text(told: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Refused(f"{told} a number or text, but is {value!r}")
    return str(value)
