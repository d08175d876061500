"""JSON values as bytes, bounded before they are parsed: their size, their depth, and the digits of numbers."""

from __future__ import annotations

import json
import re
from typing import Any

from rp_dist.errors import InvalidTransfer

MOST_BYTES = 32 << 20
MOST_DEPTH = 100
MOST_DIGITS = 1000
# Digits become zeros, so that one search finds a number that is too long: an expression takes thirty times longer.
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord("x") for byte in range(256))
_LONG_NUMBER = b"0" * (MOST_DIGITS + 1)
# A string may lack its end: to look for it again at each quote would take quadratic time.
_STRING = re.compile(rb'(?s)"(?:[^"\\]|\\.)*+"?')
_STRING_OR_BRACKET = re.compile(_STRING.pattern + rb"|[\[{\]}]")


def encode(value: object) -> bytes:
    """Return the JSON of a value. Raises `InvalidTransfer` for one that the other side would refuse.

    >>> encode({"loss": [1.5, None]})
    b'{"loss": [1.5, null]}'
    """
    try:
        data = json.dumps(value).encode()
        _check(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidTransfer(
            f"a value must be what JSON can hold, at most {MOST_DEPTH} levels deep, of {MOST_BYTES >> 20} MiB and "
            f"with numbers of {MOST_DIGITS} digits, but: {error}"
        ) from None
    return data


def decode(data: bytes) -> Any:
    """Return the value of JSON. Raises `ValueError` for anything else, and for what is too deep or too long.

    >>> decode(b"[" * 60_000)
    Traceback (most recent call last):
    ValueError: it is more than 100 levels deep
    """
    _check(data)
    return json.loads(data.decode())


def _check(data: bytes) -> None:
    if len(data) > MOST_BYTES:
        raise ValueError(f"it takes {len(data)} bytes")
    # Counting takes a microsecond where following strings and brackets takes many; few brackets cannot be deep.
    if data.count(b"[") + data.count(b"{") > MOST_DEPTH and _depth(data) > MOST_DEPTH:
        raise ValueError(f"it is more than {MOST_DEPTH} levels deep")
    if _has_long_number(data) and _has_long_number(_STRING.sub(b'""', data)):
        raise ValueError(f"it has a number of more than {MOST_DIGITS} digits")


def _has_long_number(data: bytes) -> bool:
    return _LONG_NUMBER in data.translate(_DIGITS)


def _depth(data: bytes) -> int:
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        first = data[match.start()]
        depth += (first in b"[{") - (first in b"]}")
        deepest = max(deepest, depth)
        if deepest > MOST_DEPTH:
            break
    return deepest
