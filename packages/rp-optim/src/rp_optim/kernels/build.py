"""Compile the kernels in ``csrc``, when a wheel is built or on first use.

Uses only the standard library, since the wheel's build hook loads this file by its path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"

# Without contraction and reassociation all variants give the same bits. There is no flag such as -ffast-math,
# which would link startup files that change the process's floating-point mode.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_NO_VECTORS = ("-fno-tree-vectorize", "-fno-tree-slp-vectorize")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_SECONDS = 300


class BuildFailed(Exception):
    """There is no compiler, or compilation failed; the message quotes the compiler."""


@dataclass(frozen=True, slots=True)
class CCompiler:
    """A C compiler: its command, and the output of ``--version``."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> CCompiler | None:
    """Find ``$CC`` if it is set, else the first of cc, gcc and clang that runs; None if none does.

    Raises `BuildFailed` if ``CC`` is set but does not run.
    """
    if command := os.environ.get("CC"):
        return _named_compiler(command)
    return _first_that_runs(["cc"], ["gcc"], ["clang"])


def _named_compiler(command: str) -> CCompiler:
    try:
        compiler = _first_that_runs(shlex.split(command))
    except ValueError as error:
        raise BuildFailed(f"CC must be a command, but is {command!r}: {error}; correct it, or unset it") from error
    if compiler is None:
        raise BuildFailed(f"CC must name a C compiler that runs, but is {command!r}; correct it, or unset it")
    return compiler


def _first_that_runs(*commands: Sequence[str]) -> CCompiler | None:
    for command in commands:
        if command and shutil.which(command[0]) and (version := _version(command)):
            return CCompiler(tuple(command), version)
    return None


def _version(command: Sequence[str]) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def variants() -> dict[str, tuple[str, ...]]:
    """Return the kernel variants for this machine's architecture, each with its compiler flags.

    >>> "scalar" in variants()
    True
    """
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return {"scalar": _NO_VECTORS, "avx2": _AVX2, "avx512": _AVX512}
    if machine in ("aarch64", "arm64"):
        return {"scalar": _NO_VECTORS, "neon": ()}
    return {"scalar": ()}


def source_hash() -> str:
    """Return a hash of the sources and compiler flags, in 16 hexadecimal digits."""
    digest = hashlib.sha256(repr((_FLAGS, variants())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_key(compiler: CCompiler) -> str:
    """Return a hash of everything that a library depends on: sources, architecture, system and compiler."""
    parts = (source_hash(), platform.machine(), platform.system(), *platform.libc_ver(), *compiler.command)
    return hashlib.sha256("\0".join((*parts, compiler.version)).encode()).hexdigest()[:24]


def build(compiler: CCompiler, library: Path) -> None:
    """Compile the kernels into the file `library`, which appears complete or not at all.

    Uses OpenMP if the compiler has it. Several processes may do this at once, each in its own temporary folder.

    Raises `BuildFailed`, and `OSError` if the folder of `library` cannot be written.
    """
    with compiled(compiler, library.parent) as made:
        os.replace(made, library)


@contextmanager
def compiled(compiler: CCompiler, parent: Path) -> Generator[Path]:
    """Compile a library in a temporary folder inside `parent`, which is removed when the context ends.

    Raises as `build` does.
    """
    with tempfile.TemporaryDirectory(dir=parent, prefix=".build-") as folder:
        folder_path = Path(folder)
        try:
            made = _compile(compiler, folder_path, ("-fopenmp",))
        except BuildFailed:
            made = _compile(compiler, folder_path, ())
        # The linker applies the umask, which may allow the group to write.
        made.chmod(0o755)
        # Flush the file to disk before it is renamed, so that after a crash no partial file has the final name.
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        yield made


def _compile(compiler: CCompiler, folder_path: Path, threads: tuple[str, ...]) -> Path:
    have = [f"-DRPO_HAVE_{name.upper()}" for name in variants()]
    source = f'-DRPO_SOURCE="{source_hash()}"'
    units = [("kernels.c", name, (f"-DRPO_VARIANT={name}", *flags)) for name, flags in variants().items()]
    units.append(("entry.c", "entry", (source, *have)))

    def compile_unit(unit: tuple[str, str, tuple[str, ...]]) -> str:
        file, name, flags = unit
        made = str(folder_path / f"{name}.o")
        _run(compiler, *_FLAGS, *threads, *flags, "-c", str(SOURCES / file), "-o", made)
        return made

    with ThreadPoolExecutor(len(units)) as pool:
        objects = list(pool.map(compile_unit, units))
    made = folder_path / "kernels.so"
    _run(compiler, "-shared", *threads, *objects, "-lm", "-o", str(made))
    return made


def _run(compiler: CCompiler, *arguments: str) -> None:
    try:
        done = subprocess.run(
            [*compiler.command, *arguments], capture_output=True, text=True, timeout=_SECONDS, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed(f"{compiler.command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(
            f"{' '.join(compiler.command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
