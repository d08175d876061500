"""What a program shows on a terminal of a given width: it runs in a pseudo-terminal, which is drawn."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
from pathlib import Path

import pyte
from programs import COMMAND_LINE, Program

_ROWS = 40


# The program's terminal is its input and output, too, as if the interpreter had begun there.
_ON_TERMINAL = """
import os, sys

os.dup2(1, 0)
os.dup2(1, 2)
for name in {absent}:
    os.environ.pop(name, None)
sys.stdin = open(0, encoding="utf-8", closefd=False)
sys.stdout, sys.stderr = (open(place, "w", 1, encoding="utf-8", closefd=False) for place in (1, 2))
"""


def bytes_shown(program: str, *arguments: str, columns: int, **environment: str) -> bytes:
    """Run code of Python in a pseudo-terminal, and return all that it has written there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    absent = [name for name in ("COLUMNS", "LINES", "NO_COLOR") if name not in environment]
    code = _ON_TERMINAL.format(absent=absent) + program
    own = {"TERM": "xterm-256color", **environment}
    with Program(code, *arguments, imports=COMMAND_LINE, stdout=theirs, **own) as running:
        os.close(theirs)
        written = _all_of(ours)
        status, _, complaints = running.end()
    assert status == 0, written.decode() + complaints
    return written


def _all_of(file: int) -> bytes:
    written = b""
    # A terminal that no program has open any more ends with an error.
    with open(file, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while part := terminal.read(65536):
            written += part
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
