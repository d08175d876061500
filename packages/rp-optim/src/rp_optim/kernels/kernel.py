"""Choose the kernel: load or compile the native library on first use, or fall back to torch's operations."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from rp_optim.errors import KernelUnavailable
from rp_optim.kernels.build import BuildFailed, CCompiler, build, find_compiler, source_hash
from rp_optim.kernels.cache import build_cached, cache_folder, find_cached
from rp_optim.kernels.native import NATIVE_DTYPES, Library, NativeKernel
from rp_optim.kernels.reference import TorchKernel
from rp_optim.kernels.updates import AdamUpdate, LionUpdate, SGDUpdate, Spot, UpdateKernel

_Update = TypeVar("_Update", AdamUpdate, SGDUpdate, LionUpdate)

_log = logging.getLogger(__name__)

_IN_WHEEL = Path(__file__).parent / "_kernels.so"
_TORCH = TorchKernel()


class Kernels:
    """The kernels that can run in this process, looked up on first use, and the one in use.

    >>> Kernels().current().name in Kernels().all()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, UpdateKernel] | None = None
        self._current: UpdateKernel | None = None

    def all(self) -> dict[str, UpdateKernel]:
        """Return all kernels by name, the fastest first, torch's last."""
        with self._lock:
            if self._all is None:
                self._all = {**_native_kernels(), _TORCH.name: _TORCH}
            return self._all

    def current(self) -> UpdateKernel:
        """Return the kernel in use. It is at first the one that ``RP_OPTIM_KERNEL`` names, or else the fastest."""
        if self._current is None:
            return self.use(os.environ.get("RP_OPTIM_KERNEL") or next(iter(self.all())))
        return self._current

    def use(self, name: str) -> UpdateKernel:
        """Use the kernel `name` from now on. Raises `KernelUnavailable` if it does not run here."""
        kernels = self.all()
        if name not in kernels:
            raise KernelUnavailable(
                f"the kernel must be one of {', '.join(kernels)} here, but is {name!r} instead"
            )
        self._current = kernels[name]
        return self._current


_kernels = Kernels()


def current_kernel() -> UpdateKernel:
    """Return the kernel in use."""
    return _kernels.current()


def kernel_in_use() -> str:
    """Return the kernel in use: ``avx512``, ``avx2``, ``neon``, ``scalar``, or ``torch`` without a compiler.

    >>> kernel_in_use() in available_kernels()
    True

    Raises `KernelUnavailable` if ``RP_OPTIM_KERNEL`` names one that does not run here.
    """
    return current_kernel().name


def available_kernels() -> tuple[str, ...]:
    """Return the names of all kernels that run on this machine, the fastest first.

    >>> available_kernels()[-1]
    'torch'
    """
    return tuple(_kernels.all())


def use_kernel(name: str) -> None:
    """Use another kernel from now on, in the whole process. For tests and measurements.

    >>> before = kernel_in_use()
    >>> use_kernel("torch")
    >>> kernel_in_use()
    'torch'
    >>> use_kernel(before)

    Raises `KernelUnavailable` if it does not run on this machine.
    """
    _kernels.use(name)


def kernel_for(spot: Spot) -> UpdateKernel:
    """Return the kernel in use; for fp64, which compiled kernels do not support, torch's operations."""
    return current_kernel() if spot.has_only(NATIVE_DTYPES) else _TORCH


def by_kernel(updates: Iterable[_Update]) -> Iterable[tuple[UpdateKernel, list[_Update]]]:
    """Group updates by the kernel that runs them."""
    groups: dict[UpdateKernel, list[_Update]] = {}
    for update in updates:
        groups.setdefault(kernel_for(update.spot), []).append(update)
    return groups.items()


def _native_kernels() -> dict[str, NativeKernel]:
    try:
        library, origin = _find_library()
    except (BuildFailed, OSError) as error:
        _log.warning("rp-optim runs its steps with torch's operations, which are slower: %s", error)
        return {}
    kernels = {name: NativeKernel(library, name) for name in library.variants()}
    threads = "with OpenMP" if library.openmp else "on one thread: the compiler has no OpenMP"
    _log.info("rp-optim runs its steps with the %s kernel, %s, %s", next(iter(kernels)), origin, threads)
    return kernels


def _find_library() -> tuple[Library, str]:
    """Return the wheel's library, or the cached one, or a new one; and its origin, for the log."""
    try:
        return Library(_IN_WHEEL, source_hash()), "built into the wheel"
    except OSError as error:
        _log.debug("no library in the wheel: %s", error)
        in_wheel = f"; the wheel's own library could not be loaded: {error}" if _IN_WHEEL.exists() else ""
    try:
        return _compiled_library()
    except BuildFailed as error:
        raise BuildFailed(f"{error}{in_wheel}") from error


def _compiled_library() -> tuple[Library, str]:
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("there is no C compiler that runs (cc, gcc or clang); set CC to the command of one")
    try:
        return _cached_library(compiler)
    except OSError as error:
        reason = f"the cache cannot be used: {error}"
    with tempfile.TemporaryDirectory(prefix="rp-optim-") as folder:
        library = Path(folder) / "kernels.so"
        build(compiler, library)
        return Library(library, source_hash()), f"compiled for this process alone, since {reason}"


def _cached_library(compiler: CCompiler) -> tuple[Library, str]:
    folder = cache_folder()
    try:
        if (path := find_cached(compiler, folder)) is not None:
            return Library(path, source_hash()), f"compiled before into {path}"
    except OSError as error:
        _log.debug("the library in the cache cannot be used: %s", error)
    path = build_cached(compiler, folder)
    return Library(path, source_hash()), f"compiled now into {path}"
