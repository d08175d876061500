"""Read files that users name, but never wait for one, nor read more than is expected."""

from __future__ import annotations

from pathlib import Path

from rp_trainer.errors import Refused


def check_stored(what: str, path: Path) -> None:
    """Raise `Refused` for a pipe, a socket or a device. `what`: the option and the path, for the message.

    >>> check_stored("--config /dev/zero", Path("/dev/zero"))
    Traceback (most recent call last):
    rp_trainer.errors.Refused: --config /dev/zero must be a file, but is a device; write its content to a file
    """
    from rp_presets import special_kind  # late: help needs no torch

    if (kind := special_kind(path)) is not None:
        raise Refused(f"{what} must be a file, but is {kind}; write its content to a file")


def bounded_bytes(what: str, path: Path, most_bytes: int) -> bytes:
    """Return a file's content. Raises `Refused` if it cannot be read, or has more bytes than that."""
    try:
        check_stored(what, path)
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise Refused(f"{what} cannot be read ({error.strerror})") from error
    if len(content) > most_bytes:
        raise Refused(f"{what} must have at most {most_bytes} bytes, but has more; name another file")
    return content
