"""`Rendezvous`: where the first machine listens, as others read it from torch's store."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rp_dist.links.handshake import VERSION
from rp_dist.links.secret import Secret

# Anybody who reaches MASTER_PORT can write there.
_RENDEZVOUS = re.compile(
    r"rp-dist (?P<version>[0-9]{1,3}) (?P<address>-|[0-9A-Fa-f:.]{2,45}) (?P<port>[0-9]{1,5})"
    r" (?P<run>[0-9a-f]{32}) (?P<secret>-|[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address (None: call it by MASTER_ADDR) and port of rank 0, and the name and the secret of its run.

    `secret`: None if rank 0 was given one; a machine that is not given the same one cannot take part.

    >>> rendezvous = Rendezvous("10.0.0.1", 4000, "ab" * 16, None)
    >>> rendezvous.text()
    'rp-dist 1 10.0.0.1 4000 abababababababababababababababab -'
    >>> Rendezvous.parsed(rendezvous.text()) == rendezvous
    True
    """

    address: str | None
    port: int
    run: str
    secret: Secret | None = field(repr=False)

    def text(self) -> str:
        """The rendezvous as one line."""
        secret = "-" if self.secret is None else self.secret.key.hex()
        return f"rp-dist {VERSION} {self.address or '-'} {self.port} {self.run} {secret}"

    @classmethod
    def parsed(cls, text: str | bytes) -> Rendezvous:
        """Read a rendezvous. Raises `ValueError` if it is none, or of another version."""
        found = _RENDEZVOUS.fullmatch(text if isinstance(text, str) else text.decode(errors="replace"))
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise ValueError("torch's store, at MASTER_PORT, holds an address of rank 0 that is none")
        if int(found["version"]) != VERSION:
            raise ValueError(
                f"rank 0 speaks version {found['version']} of rp-dist's protocol, and this machine version "
                f"{VERSION}; install the same version of rp-dist on all"
            )
        secret = None if found["secret"] == "-" else Secret(bytes.fromhex(found["secret"]), is_own=False)
        address = None if found["address"] == "-" else found["address"]
        return cls(address, int(found["port"]), found["run"], secret)
