"""Refuse in a line what other code refuses by an error."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rp_trainer.errors import Refused

# The class of what Rust code raises where it gives up; it is no `Exception`.
_PANIC = "PanicException"


@contextmanager
def refusing(
    what: str, kinds: tuple[type[Exception], ...] = (ValueError,), told: Callable[[BaseException], str] = str
) -> Generator[None]:
    """Refuse where the context raises an error of these kinds: `what`, and then what is `told` of the error.

    >>> with refusing("--devices: "):
    ...     int("x")
    Traceback (most recent call last):
    rp_trainer.errors.Refused: --devices: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except kinds as error:
        raise Refused(f"{what}{told(error)}") from error


@contextmanager
def refusing_all(what: str, told: Callable[[BaseException], str] = str) -> Generator[None]:
    """The same for whatever foreign code may raise, panics of Rust included, unless memory is short."""
    try:
        yield
    except (MemoryError, Refused):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise Refused(f"{what}{told(error)}") from error
