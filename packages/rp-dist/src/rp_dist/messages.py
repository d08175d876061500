"""What machines tell each other over their links, checked field by field when it arrives."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import Any, cast

MOST_RANKS = 1 << 20
_MOST_CHANNEL = 1 << 53
_MOST_TEXT = 10_000
_MOST_NAME = 300
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]{0,45}")


@dataclass(frozen=True, slots=True)
class Hello:
    """A machine introduces itself. `address`: where it listens, empty for all addresses; port 0: nowhere."""

    rank: int
    size: int
    address: str
    port: int
    process: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello, by machine `rank`."""

    rank: int


@dataclass(frozen=True, slots=True)
class RefusedNotice:
    """The answer to a hello that does not fit."""

    why: str


@dataclass(frozen=True, slots=True)
class Roster:
    """Where machines listen, by rank."""

    places: dict[int, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Say:
    """A value on a channel."""

    channel: int
    value: Any


@dataclass(frozen=True, slots=True)
class Put:
    """An entry for the store in which gloo's groups meet."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class LostNotice:
    """A machine was given up."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Bye:
    """A machine has closed."""


Message = Hello | Welcome | RefusedNotice | Roster | Say | Put | LostNotice | Bye


def parsed(message: Any) -> Message:
    """Return what a JSON value says. Raises `ValueError` if it is no message.

    >>> parsed(["lost", 2, "its process ended"])
    LostNotice(rank=2, why='its process ended')
    >>> parsed(["say", float("nan"), 0])
    Traceback (most recent call last):
    ValueError: not a message: ['say', nan, 0]
    """
    match message:
        case ["hello", int(rank), int(size), str(address), int(port), str(process)]:
            is_right = _are_ints(rank, size, port) and abs(rank) < MOST_RANKS and 0 < size < MOST_RANKS
            if is_right and 0 <= port < 1 << 16 and _ADDRESS.fullmatch(address) and len(process) < _MOST_NAME:
                return Hello(rank, size, address, port, process)
        case ["welcome", int(rank)] if _are_ints(rank):
            return Welcome(rank)
        case ["refused", str(why)] if len(why) < _MOST_TEXT:
            return RefusedNotice(why)
        case ["roster", dict()]:
            return Roster(_places(cast(dict[str, Any], message[1])))
        case ["say", int(channel), value] if _are_ints(channel) and abs(channel) < _MOST_CHANNEL:
            return Say(channel, value)
        case ["put", str(key), str(value)]:
            return Put(key, value)
        case ["lost", int(rank), str(why)] if _are_ints(rank) and 0 <= rank < MOST_RANKS and len(why) < _MOST_TEXT:
            return LostNotice(rank, why)
        case ["bye"]:
            return Bye()
        case _:
            pass
    raise ValueError(f"not a message: {reprlib.repr(message)}")


def _places(found: dict[str, Any]) -> dict[int, tuple[str, int]]:
    places: dict[int, tuple[str, int]] = {}
    for rank, place in found.items():
        match place:
            case [str(address), int(port)] if rank.isdecimal() and len(rank) < 8 and 0 <= port < 1 << 16:
                places[int(rank)] = (address, port)
            case _:
                raise ValueError(f"not a place: {reprlib.repr(place)}")
    return places


def _are_ints(*values: int) -> bool:
    # JSON's true is an int of Python.
    return not any(isinstance(value, bool) for value in values)
