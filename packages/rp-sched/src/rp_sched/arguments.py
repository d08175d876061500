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


def speed(name: str, value: object) -> float:
    """`value` as a finite speed above zero."""
    number = _real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise InvalidCost(f"{name} must be a finite speed in GB/s, above zero, but is {number!r} instead")
    return number


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, but is {value!r} instead")
    return float(value)
