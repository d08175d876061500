"""Refuse arguments that are not the numbers they should be."""

import math
import operator
from numbers import Real
from typing import SupportsIndex, cast

from rp_sched.errors import InvalidCost


def whole(name: str, value: object, *, least: int = 0, error: type[ValueError] = ValueError) -> int:
    """`value` as an int of at least `least`.

    >>> whole("devices", 0, least=1)
    Traceback (most recent call last):
    ValueError: devices must be at least 1, but is 0 instead
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number (int), but is {value!r} instead")
    number = operator.index(cast(SupportsIndex, value))
    if number < least:
        raise error(f"{name} must be at least {least}, but is {number} instead")
    return number


def milliseconds(name: str, value: object) -> float:
    """`value` as a finite time that is not negative."""
    number = _real(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise InvalidCost(f"{name} must be a finite time in ms, zero or more, but is {number!r} instead")
    return number


def speed(name: str, value: object, *, unit: str = "speed in GB/s") -> float:
    """`value` as a finite speed, or what else has this unit, above zero."""
    number = _real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise InvalidCost(f"{name} must be a finite {unit}, above zero, but is {number!r} instead")
    return number


def flag(name: str, value: object) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {value!r} instead")
    return value


def part(name: str, value: object) -> float:
    """`value` as a part of something: zero or more."""
    number = _real(name, value)
    if not number >= 0:
        raise ValueError(f"{name} must be a part, zero or more, but is {value!r} instead")
    return number


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, but is {value!r} instead")
    return float(value)
