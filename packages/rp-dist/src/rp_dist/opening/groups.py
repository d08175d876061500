"""gloo's groups: they meet over the links, on the chosen interface, prove who is there, and shut their ports."""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from rp_dist.control import GRACE_S, Control
from rp_dist.groups import GlooGroup
from rp_dist.links import interfaces

_LOG = logging.getLogger(__name__)
# torch describes its options under other names than they have.
_GLOO = cast(Any, dist.ProcessGroupGloo)
_PROOF = (1 << 31) - 2
_PROOF_BYTES = 32
_ATTACH_FILTER = 26
# A filter of one instruction: return 0, which keeps nothing of any packet.
_KEEP_NOTHING = struct.pack("HBBI", 6, 0, 0, 0)


class LinkedStore(Store):
    """A store of torch whose entries go over the links, so nobody else can read or write them."""

    def __init__(self, control: Control, group: int, timeout_s: float) -> None:
        super().__init__()
        self._control, self._group, self._timeout_s = control, group, timeout_s
        self.own = b""

    def set(self, key: str, value: bytes | str) -> None:
        """Tell an entry to all machines."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.own += data
        self._control.keep(self._name(key), data.hex())

    def get(self, key: str) -> bytes:
        """Return an entry, as soon as it is there."""
        self.wait([key])
        return bytes.fromhex(self._control.heard.kept[self._name(key)])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all entries are there. Raises `MachineLost` if a machine is lost meanwhile."""
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        names = [self._name(key) for key in keys]
        if not self._control.wait(lambda: all(name in self._control.heard.kept for name in names), seconds):
            raise TimeoutError(f"gloo's addresses did not come within {seconds:.3g} s")

    def check(self, keys: list[str]) -> bool:
        """Return whether all entries are there."""
        return all(self._name(key) in self._control.heard.kept for key in keys)

    def _name(self, key: str) -> str:
        return f"{self._group}/{key}"


def open_group(control: Control, number: int, timeout_s: float) -> GlooGroup:
    """Open group `number` of this run, with connections to all other machines."""
    store = LinkedStore(control, number, timeout_s)
    options = _GLOO._Options()
    options._devices = _devices(control)
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2 * len(options._devices)  # as torch chooses
    group: GlooGroup = _GLOO(store, control.rank, control.size, options)
    _prove(control, group, number, timeout_s)
    shut_ports(store.own)
    return group


def _devices(control: Control) -> list[Any]:
    # Not lazily: each connection is proven before the group is used.
    names = os.environ.get(interfaces.VARIABLE, "")
    if "," in names:
        return [_GLOO.create_device(interface=name.strip(), lazy_init=False) for name in names.split(",")]
    address = control.own_address() or "127.0.0.1"
    return [_GLOO.create_device(hostname=address, lazy_init=False)]


def _prove(control: Control, group: GlooGroup, number: int, timeout_s: float) -> None:
    """Check that a machine of this run is at the other end of each connection: gloo takes who connects first."""

    def code(source: int, target: int) -> bytearray:
        return bytearray(control.secret.code(f"gloo {control.run} {number} {source} {target}".encode()))

    others = [rank for rank in range(control.size) if rank != control.rank]
    # The tensors share the memory of these.
    found = {rank: bytearray(_PROOF_BYTES) for rank in others}
    works = [(rank, group.recv([_shared(found[rank])], rank, _PROOF)) for rank in others]
    works += [(rank, group.send([_shared(code(control.rank, rank))], rank, _PROOF)) for rank in others]
    for rank, work in works:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            control.wait(lambda: False, GRACE_S)
            control.give_up(rank, f"it did not prove who it is over gloo: {str(error).splitlines()[0]}")
            control.raise_error()
    for rank in others:
        if not hmac.compare_digest(found[rank], code(rank, control.rank)):
            control.give_up(rank, "somebody else has taken its place in a connection of gloo")
            control.raise_error()


def _shared(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def shut_ports(addresses: bytes) -> int:
    """Let nothing more in at this process's ports whose socket addresses are in `addresses`; return how many.

    gloo listens as long as a group lives, though all have come, and would keep every connection that anybody
    opens. It offers no way to stop that, so the kernel drops what arrives there. Linux alone.
    """
    if sys.platform != "linux":
        return 0
    instruction = ctypes.create_string_buffer(_KEEP_NOTHING)
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    shut = 0
    for found in _listening():
        if _address_bytes(found) in addresses:
            try:
                found.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                shut += 1
            except OSError as error:
                _LOG.warning("gloo's port %d stays open to strangers: %s", found.getsockname()[1], error)
    return shut


def _listening() -> Iterator[socket.socket]:
    """The TCP sockets of this process that listen, as sockets that share them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found


def _address_bytes(sock: socket.socket) -> bytes:
    """A socket's address as the kernel writes it, which is how gloo tells it."""
    host, port = sock.getsockname()[:2]
    head = struct.pack("=H", sock.family) + struct.pack("!H", port)
    flow = b"" if sock.family == socket.AF_INET else bytes(4)
    return head + flow + socket.inet_pton(sock.family, host)
