"""An option is declared once, as a field of its command's dataclass; all that is known of it comes from there."""
# Not by jsonargparse or tyro: neither names the nearest option for a mistyped name in YAML; jsonargparse reads
# anchors and lets the second of two equal names win; and where we promise one line, they print usage or a box.

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from rp_trainer.errors import Refused

from rp_cli.options.kinds import Kind

_KEY = "option"
_Options = TypeVar("_Options")


class GivenOptions(argparse.Namespace):
    """What is given, by the names of options: texts, lists of texts, and bools for flags."""

    command: str


@dataclass(frozen=True, slots=True)
class Default:
    """A default that depends on the other options: a text as if it were given, or None. `shown`: in help."""

    text: Callable[[OptionValues], str | None]
    shown: str = ""

    def __str__(self) -> str:
        """As help says it."""
        return self.shown


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Its name is its field's, unless it has another.

    `default`: what it is as if it were given, None, or a function of the other options. `shown`: what help says of
    the default, if not that itself. `narrowed`: the kind that it is under the other options. `excludes`: the field
    of an option that cannot be given beside it; `needs`: the field of one that must be, and why. `in_files`:
    whether YAML may have it. `is_free`: a resumed run may have another value, which affects results only by
    rounding, as it may have other places, whose content is compared. `is_positional`: it has no name on the
    command line, and must be there.
    """

    help: str
    kind: Kind
    default: str | list[str] | bool | Default | None = None
    shown: str = ""
    name: str = ""
    group: str = ""
    narrowed: Callable[[OptionValues], Kind] | None = None
    excludes: str = ""
    needs: tuple[str, str] | None = None
    in_files: bool = True
    is_free: bool = False
    is_positional: bool = False

    @property
    def flag(self) -> str:
        """The option as written on the command line."""
        if self.is_positional:
            return self.kind.metavar
        return f"--{self.name.replace('_', '-')}"

    @property
    def told(self) -> str:
        """Help, with the default."""
        shown = self.shown or (str(self.default) if isinstance(self.default, str | Default) else "")
        return f"{self.help} ({shown})" if shown else self.help


def option(help: str, kind: Kind, default: Any = None, *, compare: bool = True, **more: Any) -> Any:
    """Declare a field that is an option; `more`: of `Option`."""
    return field(metadata={_KEY: Option(help, kind, default, **more)}, compare=compare)


@cache
def declared(command: type[Any]) -> dict[str, Option]:
    """Return the options of a command's dataclass by their fields."""
    own = {each.name: each.metadata[_KEY] for each in fields(command)}
    return {name: replace(one, name=one.name or name) for name, one in own.items()}


class OptionValues:
    """The values of a command's options, each read when it is first asked for.

    Raises `Refused` for options that do not go together, and for values that cannot be used.
    """

    def __init__(self, options: Mapping[str, Option], given: GivenOptions) -> None:
        self._options, self._given = options, vars(given)
        self._values: dict[str, Any] = {}
        for name in filter(self.is_given, options):
            self._check_others(options[name])

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            option = self._options[name]
            self._values[name] = (
                self._read(option, self._given[option.name])
                if option.name in self._given
                else self._default(option)
            )
        return self._values[name]

    def is_given(self, name: str) -> bool:
        """Return whether an option is given; a flag, if it is on."""
        return self._given.get(self._options[name].name) not in (None, False)

    def is_usual(self, name: str) -> bool:
        """Return whether an option has its default, given or not."""
        return self[name] == self._default(self._options[name])

    def _default(self, option: Option) -> Any:
        default = option.default
        text = default.text(self) if isinstance(default, Default) else default
        return None if text is None else self._read(option, text)

    def _read(self, option: Option, given: Any) -> Any:
        kind = option.narrowed(self) if option.narrowed else option.kind
        return kind.read(option.flag, given)

    def _check_others(self, option: Option) -> None:
        if option.excludes and self.is_given(option.excludes):
            other = self._options[option.excludes].flag
            raise Refused(f"{option.flag} and {other} exclude each other; use one of them")
        if option.needs and not self.is_given(option.needs[0]):
            name, why = option.needs
            raise Refused(f"{option.flag} needs {self._options[name].flag}{why}")


def read(command: type[_Options], given: GivenOptions) -> _Options:
    """Read the options of a command, apart from what depends on files and devices.

    Raises `Refused` for a value that cannot be used, and for options that do not go together.
    """
    options = declared(command)
    reading = OptionValues(options, given)
    return command(**{name: reading[name] for name in options})
