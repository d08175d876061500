"""Read options from a YAML file, with the names that they have on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rp_strangers.plain_yaml import Value, read_plain
from rp_trainer.errors import Refused

from rp_cli.options.declared import GivenOptions, Option
from rp_cli.recipes.catalogue import PREFIX, file_of, recipe_named

_MOST_COMPARED = 60


def with_config(
    given: GivenOptions, options: Mapping[str, Option], others: Mapping[str, Option] | None = None
) -> GivenOptions:
    """Return what is given with the file ``--config`` added; the command line takes precedence.

    This includes options that exclude each other: ``--steps`` replaces ``epochs`` of the file.

    `others`: of the command that the file is for, if it is for another one. Those that `options` lacks are passed
    over, as are places other than the model's; the model of a recipe is the configuration that comes with it.

    Raises `Refused` for a file that cannot be read, an unknown name (with the nearest known name, if any), and a
    value of another kind.
    """
    on_command_line = vars(given)
    if "config" not in on_command_line:
        return given
    path, known = file_of(given.config), {one.name: one for one in options.values() if one.in_files}
    elsewhere = {one.name: one for one in (others or {}).values() if one.in_files}
    apart = {name for name, one in elsewhere.items() if one.kind.is_place and name != "model"}
    named = _named(path, known | elsewhere)
    in_file = {
        name: _value(path, known[name], value) for name, value in named.items() if name in known.keys() - apart
    }
    if others is not None and given.config.startswith(PREFIX):
        in_file["model"] = str(recipe_named(given.config.removeprefix(PREFIX)).configuration)
    for one in options.values():
        # Of two that exclude each other the command line's counts.
        for here, other in ((one.name, one.excludes), (one.excludes, one.name)):
            if here and here in on_command_line:
                in_file.pop(other, None)
    return GivenOptions(**{**in_file, **on_command_line})


def schema(options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the JSON schema of files for ``--config``, by which an editor completes and checks them.

    It has each value, but not which of them go together.
    """
    known = [(one.name.replace("_", "-"), one) for one in options.values() if one.in_files]
    # Names may have underscores, too.
    others = {one.name: {"$ref": f"#/properties/{name}"} for name, one in known}
    own = {name: {**one.kind.schema, "description": one.told} for name, one in known}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {**others, **own},
        "additionalProperties": False,
    }


def _named(path: Path, known: Mapping[str, Option]) -> dict[str, Value]:
    named: dict[str, Value] = {}
    for key, value in read_plain("--config", path):
        name = key.replace("-", "_")
        if name not in known:
            raise Refused(f"--config {path} has an unknown option {key!r:.60}; {_nearest(key, known)}")
        if name in named:
            raise Refused(f"--config {path} has {key!r} twice; remove one")
        named[name] = value
    return named


def _nearest(key: str, known: Mapping[str, Option]) -> str:
    names = [one.replace("_", "-") for one in known]
    # Comparing takes the square of the length, and no option's name is as long.
    nearest = difflib.get_close_matches(key[:_MOST_COMPARED].replace("_", "-"), names, n=1)
    return f"the nearest one is {nearest[0]!r}" if nearest else "`roundpipe train --help` lists them"


def _value(path: Path, option: Option, value: Value) -> Any:
    """Return the value as the command line would have it: text, a list of texts, or a bool for a flag."""
    must_be = f"--config {path}: {option.name.replace('_', '-')} must be"
    match option.kind.takes:
        case "values" if value == []:
            raise Refused(f"{must_be} at least one value, but is an empty list")
        case "values":
            return [_text(must_be, item) for item in (value if isinstance(value, list) else [value])]
        case "value":
            return _text(must_be, value)
        case _ if isinstance(value, bool):
            return value
        case _:
            raise Refused(f"{must_be} true or false, but is {_shown(value)}")


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
