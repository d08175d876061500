"""Read options of `roundpipe train` from a YAML file, with the names that they have on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused

from rp_cli.options import EITHER, Given
from rp_cli.strangers.plain_yaml import Value, read_plain

# Options that a file cannot have.
_NOT_IN_FILES = frozenset({"command", "json", "config"})
_MOST_COMPARED = 60


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


def _named(path: Path, known: Mapping[str, str]) -> dict[str, Value]:
    named: dict[str, Value] = {}
    for key, value in read_plain("--config", path):
        name = key.replace("-", "_")
        if name not in known or name in _NOT_IN_FILES:
            raise Refused(f"--config {path} has an unknown option {key!r:.60}; {_nearest(key, known)}")
        if name in named:
            raise Refused(f"--config {path} has {key!r} twice; remove one")
        named[name] = value
    return named


def _nearest(key: str, known: Mapping[str, str]) -> str:
    names = [one.replace("_", "-") for one in known if one not in _NOT_IN_FILES]
    # Comparing takes the square of the length, and no option's name is as long.
    nearest = difflib.get_close_matches(key[:_MOST_COMPARED].replace("_", "-"), names, n=1)
    return f"the nearest one is {nearest[0]!r}" if nearest else "`roundpipe train --help` lists them"


def _value(path: Path, name: str, value: Value, kind: str) -> Any:
    """Return the value as the command line would have it: text, a list of texts, or a bool for a flag."""
    must_be = f"--config {path}: {name.replace('_', '-')} must be"
    if kind == "flag":
        if not isinstance(value, bool):
            raise Refused(f"{must_be} true or false, but is {_shown(value)}")
        return value
    if kind == "values":
        items = value if isinstance(value, list) else [value]
        return [_text(must_be, item) for item in items]
    return _text(must_be, value)


def _text(must_be: str, value: Value) -> str:
    if not isinstance(value, str):
        raise Refused(f"{must_be} a number or text, but is {_shown(value)}")
    return value


def _shown(value: Value) -> str:
    match value:
        case list():
            return "a list"
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case _:
            return f"{value!r:.60}"
