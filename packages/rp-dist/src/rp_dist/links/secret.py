"""`Secret`: what proves that a machine takes part in a run; from the environment or a file, or made for a run."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field

from rp_dist.errors import InvalidSecret

VARIABLE = "ROUNDPIPE_SECRET"
FILE_VARIABLE = "ROUNDPIPE_SECRET_FILE"
LEAST_BYTES = 16
_MOST_BYTES = 4096
_MAKE = 'make one with: python -c "import secrets; print(secrets.token_hex(32))"'


@dataclass(frozen=True, slots=True)
class Secret:
    """The key of every message's code. `is_own`: given by the user, so it never crosses the network.

    >>> Secret(b"0123456789abcdef", is_own=True)
    Secret(is_own=True)
    """

    # Not in `repr`: whatever logs or raises must not show it.
    key: bytes = field(repr=False)
    is_own: bool

    @classmethod
    def found(cls) -> Secret | None:
        """Read `ROUNDPIPE_SECRET`, or the file that `ROUNDPIPE_SECRET_FILE` names; None if neither is set.

        Raises `InvalidSecret` for one that is too short, and for a file that others may read or write.
        """
        text, path = os.environ.get(VARIABLE), os.environ.get(FILE_VARIABLE)
        if text is not None and path is not None:
            raise InvalidSecret(f"set {VARIABLE} or {FILE_VARIABLE}, but both are set")
        if text is not None:
            return cls(_checked(os.fsencode(text), VARIABLE), is_own=True)
        return None if path is None else cls(_checked(_read(path), path), is_own=True)

    @classmethod
    def made(cls) -> Secret:
        """A random one, for one run."""
        return cls(secrets.token_bytes(32), is_own=False)

    def code(self, *parts: bytes) -> bytes:
        """Return 32 bytes that only who knows the secret can tell for these parts."""
        # Each part with its length, so that no two lists of parts are the same bytes.
        return hmac.digest(self.key, b"".join(len(part).to_bytes(4) + part for part in parts), "sha256")


def _checked(key: bytes, where: str) -> bytes:
    key = key.strip()
    if len(key) < LEAST_BYTES:
        raise InvalidSecret(
            f"the secret in {where} must have {LEAST_BYTES} bytes or more, but has {len(key)}; {_MAKE}"
        )
    return key


def _read(path: str) -> bytes:
    # Not blocking: to open a FIFO would wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidSecret(f"{FILE_VARIABLE} names {path}, which cannot be read: {error.strerror}") from None
    try:
        _check_file(os.fstat(descriptor), path)
        # A little more than is allowed, to notice it.
        key = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) > _MOST_BYTES:
        raise InvalidSecret(f"{FILE_VARIABLE} names {path}, which has more than {_MOST_BYTES} bytes; {_MAKE}")
    return key


def _check_file(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidSecret(f"{FILE_VARIABLE} must name a regular file, but {path} is none")
    if found.st_uid not in (os.geteuid(), 0):
        raise InvalidSecret(f"{FILE_VARIABLE} names {path}, which belongs to another user; take one of your own")
    if found.st_mode & 0o077:
        raise InvalidSecret(
            f"{FILE_VARIABLE} names {path}, which others may use (mode {stat.S_IMODE(found.st_mode):04o}); its "
            f"mode must be 0600: chmod 600 {path}"
        )
