"""Contiguous spans of layers or microbatches: format, validate and divide `range` objects."""

from itertools import pairwise


def text(span: range) -> str:
    """Format a span as tasks, plans and errors show it.

    >>> text(range(0, 7))
    '0:7'
    """
    return f"{span.start}:{span.stop}"


def check(name: str, span: object, *, error: type[ValueError]) -> None:
    """Raise unless `span` is a range with step 1, not empty, and starts at 0 or above.

    >>> check("layers", range(3, 3), error=ValueError)
    Traceback (most recent call last):
    ValueError: layers must not be empty, but is range(3, 3) instead
    """
    if not isinstance(span, range):
        raise TypeError(f"{name} must be a range, but is {span!r} instead")
    if span.step != 1:
        raise error(f"{name} must be a range with step 1, but is {span!r} instead")
    if not span:
        raise error(f"{name} must not be empty, but is {span!r} instead")
    if span.start < 0:
        raise error(f"{name} must start at 0 or above, but is {span!r} instead")


def divide(count: int, parts: int) -> tuple[range, ...]:
    """Divide `range(count)` into `parts` contiguous spans whose lengths differ by at most one.

    >>> divide(5, 3)
    (range(0, 2), range(2, 4), range(4, 5))
    """
    edges = [(count * part + parts - 1) // parts for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(edges))
