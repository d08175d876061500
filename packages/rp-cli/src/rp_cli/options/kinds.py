"""What options take: the name of a value in help, how its text is read, and its JSON schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rp_trainer.errors import Refused

Schema = Mapping[str, Any]
_Number = TypeVar("_Number", int, float)
_TEXT: Schema = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value. `read`: from the option as written and the given text, list of texts, or state of a flag.

    `is_place`: whether it is a place of a machine, which others may name otherwise. Reading raises `Refused` for a
    value that cannot be used.
    """

    metavar: str
    read: Callable[[str, Any], Any]
    schema: Schema = field(default_factory=lambda: _TEXT)
    takes: Literal["value", "values", "flag", "switch"] = "value"
    is_place: bool = False


def _as_given(_: str, value: Any) -> Any:
    return value


def _turned(_: str, is_on: bool) -> bool:
    return not is_on


FLAG = Kind("", _as_given, {"type": "boolean"}, "flag")
OFF = Kind("", _turned, {"type": "boolean"}, "flag")
SWITCH = Kind("", _as_given, {"type": "boolean"}, "switch")
DEVICES = Kind("DEVICES", _as_given, is_place=True)
TEXT = Kind("TEXT", _as_given)


def several(kind: Kind, *, apart_by: str | None = None) -> Kind:
    """One or more values of a kind, as a tuple. `apart_by`: what may stand between them beside spaces.

    >>> several(one_of(["a", "b"]), apart_by=",").read("--kinds", ["a,b"])
    ('a', 'b')
    """

    def read(flag: str, texts: list[str]) -> tuple[Any, ...]:
        apart = texts if apart_by is None else [part for text in texts for part in text.split(apart_by)]
        return tuple(kind.read(flag, text) for text in apart)

    return listed(kind.metavar, read, kind.schema, is_place=kind.is_place)


def listed(
    metavar: str, read: Callable[[str, list[str]], Any], item: Schema = _TEXT, *, is_place: bool = False
) -> Kind:
    """One or more values that are read together."""
    schema = {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]}
    return Kind(metavar, read, schema, "values", is_place)


def _checked(
    metavar: str, of: type[_Number], wanted: str, is_fit: Callable[[_Number], bool], schema: Schema
) -> Kind:
    def read(flag: str, text: str) -> _Number:
        number = parsed(of, text)
        if number is None or number == math.inf or not is_fit(number):
            raise Refused(f"{flag} must be {wanted}, but is {text!r}")
        return number

    return Kind(metavar, read, schema)


def whole(least: int, most: int, metavar: str = "N", *, also: str = "", bounds: str = "") -> Kind:
    """A whole number. `also`: what else is allowed; `bounds`: in other words.

    >>> whole(1, 9).read("--keep", "3")
    3
    """
    wanted = f"{also}a whole number {bounds or f'of at least {least} and at most {most}'}"
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return _checked(metavar, int, wanted, lambda number: least <= number <= most, schema)


def number(least: float, most: float, metavar: str = "") -> Kind:
    """A finite number from `least` to `most`."""
    wanted = f"a number from {least:g} to {most:g}" if math.isfinite(most) else f"a number of at least {least:g}"
    schema = {"type": "number", "minimum": least, "maximum": min(most, 1e308)}
    return _checked(metavar, float, wanted, lambda number: least <= number <= most, schema)


def number_or_zero(least: float, most: float, metavar: str = "") -> Kind:
    """A number from `least` to `most`, or 0."""
    schema = {"type": "number", "minimum": 0, "maximum": most}
    wanted = f"a number from {least:g} to {most:g}, or 0"
    return _checked(metavar, float, wanted, lambda number: number == 0 or least <= number <= most, schema)


def positive(
    metavar: str = "RATE", wanted: str = "a finite number above 0", *, least: float = 0.0, most: float = math.inf
) -> Kind:
    """A finite number above 0. `wanted`: in other words; `least`, `most`: bounds that need no words."""
    schema = {"type": "number", "exclusiveMinimum": 0}
    return _checked(metavar, float, wanted, lambda number: number > 0 and least <= number <= most, schema)


def one_of(names: Sequence[str], metavar: str = "", *, hints: Mapping[str, str] | None = None) -> Kind:
    """One of these names. `hints`: what is said of others beside that.

    >>> one_of(["fp32", "bf16"]).metavar
    'fp32|bf16'
    """

    def read(flag: str, text: str) -> str:
        if text not in names:
            hint = (hints or {}).get(text, "")
            raise Refused(f"{flag} must be one of {', '.join(names)}, but is {text!r}{hint}")
        return text

    return Kind(metavar or "|".join(names), read, {"enum": list(names)})


def path(metavar: str = "PATH", *, is_utf8: bool = False) -> Kind:
    """A path. `is_utf8`: in UTF-8, as libraries not written in Python, such as safetensors, require."""

    def read(flag: str, text: str) -> Path:
        if not text or "\0" in text:
            raise Refused(f"{flag} must name a path, but is {text!r}")
        # Other bytes of a command line are halves of surrogate pairs in the text.
        if is_utf8 and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise Refused(f"{flag} must be a path in UTF-8, but is {text!r}")
        return Path(text)

    return Kind(metavar, read, is_place=True)


def parsed(of: type[_Number], text: str) -> _Number | None:
    """Return the text as a number of this type; None if it is none."""
    try:
        return of(text)
    except ValueError:
        return None
