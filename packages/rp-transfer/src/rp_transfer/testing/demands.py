"""What a promise demands of a backend, as an error where it is broken."""

from __future__ import annotations

from collections.abc import Callable

from rp_transfer.errors import NotConforming


def demand(truth: bool, promise: str) -> None:
    """Raise `NotConforming` unless a promise is kept."""
    if not truth:
        raise NotConforming(promise)


def demand_raises(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    """Raise `NotConforming` unless a call raises an error of this kind."""
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise NotConforming(f"{what} must raise {kind.__name__}, but raised {error!r}") from error
    raise NotConforming(f"{what} must raise {kind.__name__}, but raised nothing")
