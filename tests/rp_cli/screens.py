"""What a program shows on a terminal of a given width: it runs in a pseudo-terminal, which is drawn."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pyte

_ROWS = 40


def bytes_shown(program: Sequence[str], columns: int, **environment: str) -> bytes:
    """Run a program of Python in a pseudo-terminal, and return all that it has written there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    own = {**inherited, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    process = subprocess.Popen([sys.executable, *program], stdin=theirs, stdout=theirs, stderr=theirs, env=own)
    os.close(theirs)
    written = b""
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(65536):
                written += part
        except OSError:
            # So ends a terminal that no program has open any more.
            pass
    assert process.wait(timeout=100) == 0, written.decode()
    return written


def picture(written: bytes, columns: int) -> str:
    """Return what is on the screen in the end, by lines without trailing spaces."""
    screen = pyte.Screen(columns, _ROWS)
    pyte.ByteStream(screen).feed(written)
    return "\n".join(line.rstrip() for line in screen.display).rstrip() + "\n"


def colours(written: bytes, columns: int) -> dict[str, str]:
    """Return what is written in each colour but the terminal's own, by colour."""
    screen = pyte.Screen(columns, _ROWS)
    pyte.ByteStream(screen).feed(written)
    found: dict[str, str] = {}
    for row in range(_ROWS):
        for column in range(columns):
            cell = screen.buffer[row][column]
            if cell.fg != "default":
                found[cell.fg] = found.get(cell.fg, "") + cell.data
    return found


def check_golden(file: Path, text: str) -> None:
    """Compare with a file; write it where ``ROUNDPIPE_DRAW`` is set."""
    if os.environ.get("ROUNDPIPE_DRAW"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
