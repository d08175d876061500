"""Read options of `roundpipe train` from a YAML file, with the names that they have on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from roundpipe.cli.errors import Refused
from roundpipe.cli.options import EITHER, Given

# Options that a file cannot have.
_NOT_IN_FILES = frozenset({"command", "json", "config"})


def with_config(given: Given, known: Mapping[str, str]) -> Given:
    """Return the options with those of the file ``--config`` added; the command line takes precedence.

    This includes options that exclude each other: ``--steps`` replaces ``epochs`` of the file.

    Args:
        known: what each option of the command takes by its name: ``"value"``, ``"values"`` or ``"flag"``.

    Raises `Refused` for a file that cannot be read, an unknown name (with the nearest known name, if any), and a
    value of another kind.
    """
    if given.config is None:
        return given
    path = Path(given.config)
    in_file = {name: _value(path, name, value, known[name]) for name, value in _named(path, known).items()}
    others = {other for pair in EITHER for one, other in (pair, pair[::-1]) if one in vars(given)}
    kept = {name: value for name, value in in_file.items() if name not in others}
    return Given(**{**kept, **vars(given)})


def _named(path: Path, known: Mapping[str, str]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, value in _content(path).items():
        name = str(key).replace("-", "_")
        if name not in known or name in _NOT_IN_FILES:
            names = [one.replace("_", "-") for one in known if one not in _NOT_IN_FILES]
            nearest = difflib.get_close_matches(str(key).replace("_", "-"), names, n=1)
            hint = f"the nearest one is {nearest[0]!r}" if nearest else "`roundpipe train --help` lists them"
            raise Refused(f"--config {path} has an unknown option {key!r}; {hint}")
        if name in named:
            raise Refused(f"--config {path} has {key!r} twice")
        named[name] = value
    return named


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
    """Return the value as the command line would have it: text, a list of texts, or a bool for a flag."""
    must_be = f"--config {path}: {name.replace('_', '-')} must be"
    if kind == "flag":
        if not isinstance(value, bool):
            raise Refused(f"{must_be} true or false, but is {value!r}")
        return value
    if kind == "values":
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        return [_text(must_be, item) for item in items]
    return _text(must_be, value)


def _text(must_be: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Refused(f"{must_be} a number or text, but is {value!r}")
    return str(value)
