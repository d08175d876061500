"""Validate numeric arguments and format values for error messages."""

import math
import operator
import reprlib
from numbers import Real
from typing import SupportsIndex, cast

from rp_sched.errors import InvalidCost
from rp_sched.problem.bounds import BYTES, LEAST_GB_S, MOST_MS, Bound

_LONGEST = 80
_DIGITS_PER_BIT = math.log10(2)


class _Shortened(reprlib.Repr):
    """Formats any value as one short line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST

    def repr_int(self, x: int, level: int) -> str:
        del level
        # Python refuses to convert integers with thousands of digits to text.
        bits = x.bit_length()
        return repr(x) if bits <= 64 else f"a number of about {max(1, round(bits * _DIGITS_PER_BIT))} digits"


shown = _Shortened().repr
"""A short text for a value, for error messages, however large or deeply nested the value is.

>>> shown(7), shown(10**400), shown([[[[[[[[]]]]]]]])
('7', 'a number of about 400 digits', '[[[[[[[...]]]]]]]')
"""


def whole(
    name: str,
    value: object,
    *,
    least: int = 0,
    bound: Bound | None = None,
    error: type[ValueError] = ValueError,
) -> int:
    """Return `value` as an int of at least `least` and, if given, at most `bound`.

    >>> whole("devices", 0, least=1)
    Traceback (most recent call last):
    ValueError: devices must be at least 1, but is 0 instead
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number (int), but is {shown(value)} instead")
    number = operator.index(cast(SupportsIndex, value))
    if number < least:
        raise error(f"{name} must be at least {least}, but is {shown(number)} instead")
    if bound is not None:
        at_most(name, number, bound, error=error)
    return number


def at_most(name: str, number: int, bound: Bound, *, error: type[ValueError] = ValueError) -> None:
    """Refuse a number above a bound.

    >>> at_most("gaps", 3, Bound(2, "since it is an example"))
    Traceback (most recent call last):
    ValueError: gaps must be at most 2, since it is an example, but is 3 instead
    """
    if number > bound.most:
        raise error(f"{name} must be at most {bound.most}, {bound.reason}, but is {shown(number)} instead")


def nbytes(name: str, value: object, *, least: int = 0) -> int:
    """Return `value` as a number of bytes."""
    return whole(name, value, least=least, bound=BYTES, error=InvalidCost)


def milliseconds(name: str, value: object) -> float:
    """Return `value` as a finite, non-negative time in ms."""
    return amount(name, value, unit="time in ms")


def amount(name: str, value: object, *, unit: str) -> float:
    """Return `value` as a non-negative number of at most `MOST_MS`; `unit` names the quantity in errors."""
    number = _real(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise InvalidCost(f"{name} must be a finite {unit}, zero or more, but is {number!r} instead")
    if number > MOST_MS:
        raise InvalidCost(
            f"{name} must be a {unit} of at most {MOST_MS:g}, so that sums stay finite, but is {number!r} instead"
        )
    return number


def speed(name: str, value: object, *, unit: str = "speed in GB/s") -> float:
    """Return `value` as a finite number of at least 1e-9 (one byte, in GB); `unit` names it in errors."""
    number = _real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise InvalidCost(f"{name} must be a finite {unit}, above zero, but is {number!r} instead")
    if number < LEAST_GB_S:
        raise InvalidCost(f"{name} must be a {unit} of at least {LEAST_GB_S:g}, but is {number!r} instead")
    return number


def part(name: str, value: object) -> float:
    """Return `value` as a fraction from 0 to 1."""
    number = _real(name, value)
    if not 0 <= number <= 1:
        raise InvalidCost(f"{name} must be a number from 0 to 1, but is {number!r} instead")
    return number


def flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {shown(value)} instead")
    return value


def non_negative(name: str, value: object) -> float:
    """Return `value` as a non-negative number, such as a fraction."""
    number = _real(name, value)
    if not number >= 0:
        raise ValueError(f"{name} must be a number of at least 0, but is {number!r} instead")
    return number


def _real(name: str, value: object) -> float:
    """Return `value` as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, but is {shown(value)} instead")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidCost(
            f"{name} must be a number in the range of a float, but is {shown(value)} instead"
        ) from error
