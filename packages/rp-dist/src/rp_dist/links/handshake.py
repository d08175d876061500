"""The first bytes of a link: both sides tell their version and a random number, of which the link's keys are made.

    the one that connects   "rp-dist" version nonce
    the one that accepts    "rp-dist" version nonce token

From then on both send frames with codes (`frames`). Two links never have the same keys, nor have the two
directions of one, so what was recorded on one link is worth nothing on another.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from rp_dist.links.secret import Secret

VERSION = 1
# How long the kernel may take to connect before it is asked again.
CONNECT_S = 5.0
_MAGIC = b"rp-dist"
_HEAD_BYTES = len(_MAGIC) + 1
NONCE_BYTES = 32
TOKEN_BYTES = 16
REQUEST_BYTES = _HEAD_BYTES + NONCE_BYTES
ANSWER_BYTES = REQUEST_BYTES + TOKEN_BYTES


class NotOurs(ConnectionError):
    """The other side does not speak this protocol."""


class OtherVersion(ConnectionError):
    """The other side speaks another version of this protocol."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one link, of what is sent and of what arrives."""

    outgoing: bytes = field(repr=False)
    incoming: bytes = field(repr=False)


def nonce() -> bytes:
    """A number that was never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def token() -> str:
    """The name of a run; everybody may know it."""
    return secrets.token_hex(TOKEN_BYTES)


def request(own: bytes) -> bytes:
    """The first bytes of the side that connects."""
    return _MAGIC + bytes([VERSION]) + own


def answer(own: bytes, run: str) -> bytes:
    """The first bytes of the side that accepts."""
    return request(own) + bytes.fromhex(run)


def check(data: bytes | bytearray) -> None:
    """Raise `NotOurs` or `OtherVersion` as soon as the first bytes show it."""
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise NotOurs("it does not speak the protocol of rp-dist")
    if len(data) >= _HEAD_BYTES and data[len(_MAGIC)] != VERSION:
        raise OtherVersion(
            f"it speaks version {data[len(_MAGIC)]} of rp-dist's protocol, and this machine version {VERSION}; "
            "install the same version of rp-dist on all"
        )


def nonce_in(data: bytes | bytearray) -> bytes:
    """The other side's number."""
    return bytes(data[_HEAD_BYTES:REQUEST_BYTES])


def run_in(data: bytes | bytearray) -> str:
    """The name of the run in which an answer was given."""
    return bytes(data[REQUEST_BYTES:ANSWER_BYTES]).hex()


def keys(secret: Secret, run: str, connecting: bytes, accepting: bytes, *, accepts: bool) -> Keys:
    """Return a link's keys. `connecting`, `accepting`: the numbers of both sides. `accepts`: this side did."""
    to_acceptor, to_connector = (
        secret.code(b"rp-dist link", bytes([VERSION]), direction, bytes.fromhex(run), connecting, accepting)
        for direction in (b"to the one that accepts", b"to the one that connects")
    )
    return Keys(to_connector, to_acceptor) if accepts else Keys(to_acceptor, to_connector)
