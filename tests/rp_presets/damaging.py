"""Ways to damage a file of a model's folder, as downloads, copies and checkouts do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456789\n"


def _cut(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path) -> None:
    file.unlink()
    file.symlink_to("not-there")


def _header(length: int) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(length.to_bytes(8, "little") + b"{}" * 20)


# Each leaves what no reader of any of these files can use.
WAYS: Mapping[str, Callable[[Path], object]] = {
    "cut": _cut,
    "empty": lambda file: file.write_bytes(b""),
    "random": lambda file: file.write_bytes(random.Random(0).randbytes(999)),
    "zeros": lambda file: file.write_bytes(bytes(4096)),
    "html": lambda file: file.write_text("\n<!DOCTYPE html><html>404</html>"),
    "pointer": lambda file: file.write_text(POINTER),
    "list": lambda file: file.write_text("[1, 2]"),
    "text": lambda file: file.write_text('"x"'),
    "deep": lambda file: file.write_text("[" * 100_000),
    "huge header": _header(2**62),
    "header beyond C's integers": _header(2**64 - 1),
    "header of 90 MB": _header(90_000_000),
    "folder": _folder,
    "link to nothing": _link,
}
