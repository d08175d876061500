"""Which address of this machine to listen on: that of the chosen network interface, not all of them."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

from rp_dist.errors import InvalidTransfer

VARIABLE = "GLOO_SOCKET_IFNAME"
# Linux: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"


def chosen() -> str | None:
    """Return the address of the interface that `GLOO_SOCKET_IFNAME` names (of several the first); None without.

    Raises `InvalidTransfer` if there is no such interface, or if it has no address.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    # Elsewhere nothing in the standard library tells an interface's address.
    if not names or sys.platform != "linux":
        return None
    present = [name for _, name in socket.if_nameindex()]
    if names[0] not in present:
        raise InvalidTransfer(
            f"{VARIABLE} must name a network interface of this machine ({', '.join(present)}), but is {names[0]!r}"
        )
    address = _ipv4_address(names[0]) or _ipv6_address(names[0])
    if address is None:
        raise InvalidTransfer(f"{VARIABLE} is {names[0]!r}, which has no address; name an interface that has one")
    return address


def of_first(host: str) -> str | None:
    """Return the address at which the first machine listens, which others call `host`; None for all addresses.

    That is `host`, if it is an address of this machine.
    """
    if (address := chosen()) is not None:
        return address
    if _are_all_here():
        return "127.0.0.1"
    return local_address(host)


def local_address(host: str) -> str | None:
    """Return the address of this machine that other machines call `host`; None if it has none that is certain."""
    addresses = [address for address in _resolved(host) if _is_local(address)]
    # Many distributions resolve a machine's own name to a loopback address, which others resolve to another one.
    if not _is_loopback_by_name(host) and not _are_all_here():
        addresses = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return next(iter(addresses), None)


def local_end(sock: socket.socket) -> str:
    """Return this machine's address of a connection."""
    return plain(str(sock.getsockname()[0]))


def plain(address: str) -> str:
    """Return an address without what a socket for both families adds.

    >>> plain("::ffff:10.0.0.1"), plain("fd00::1")
    ('10.0.0.1', 'fd00::1')
    """
    return address.removeprefix("::ffff:") if "." in address else address


def listener(address: str | None, port: int = 0) -> socket.socket:
    """Return a socket that listens on an address; on all if it is None."""
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _are_all_here() -> bool:
    """Whether torchrun started all processes on this machine."""
    size = os.environ.get("WORLD_SIZE")
    return size is not None and os.environ.get("LOCAL_WORLD_SIZE") == size


def _ipv4_address(interface: str) -> str | None:
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return None


def _ipv6_address(interface: str) -> str | None:
    with suppress(OSError):
        for line in _INET6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            # Others cannot use an address of the link: its scope has another number there.
            if name == interface and scope == _GLOBAL:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found if "%" not in str(each[4][0])))


def _is_local(address: str) -> bool:
    try:
        listener(address).close()
    except OSError:
        return False
    return True


def _is_loopback_by_name(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
