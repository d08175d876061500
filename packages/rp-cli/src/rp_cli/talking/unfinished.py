"""`Unfinished`: the completions of a file of prompts, in a file beside --output until there are all."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rp_strangers.refusing import refusing
from rp_trainer.errors import Refused

Row = Mapping[str, Any]


class Unfinished:
    """Completions that are written so far. `rows`: of all prompts. `output`: where all of them come to be."""

    def __init__(self, output: Path, rows: Sequence[Row]) -> None:
        self.path = output.with_name(output.name + ".part")
        self._output = output
        self._rows = rows
        self.num_done = 0

    def resume(self) -> None:
        """Go on with those that are there. Raises `Refused` if there are none, or those of other prompts."""
        with refusing(f"--resume: {self.path} cannot be read: ", (OSError,)):
            lines = self.path.read_bytes().splitlines(keepends=True)
        # Whoever was stopped while it wrote has left part of a line.
        whole = [line for line in lines if line.endswith(b"\n")]
        for number, line in enumerate(whole, start=1):
            if number > len(self._rows) or _asked_in(line) != _asked(self._rows[number - 1]):
                raise Refused(
                    f"--resume: line {number} of {self.path} is not of that prompt of --prompts; give the prompts "
                    "that it was made of, or --overwrite in place of --resume"
                )
        self.num_done = len(whole)

    @contextmanager
    def written(self, num_kept: int) -> Generator[Unfinished]:
        """Write what follows the first `num_kept` completions inside the context; it has its name at the end.

        Where that fails, a line tells how many are written, and how to go on.
        """
        with refusing(f"--output {self._output} cannot be written: ", (OSError,)):
            kept = self.path.read_bytes().splitlines(keepends=True)[:num_kept] if num_kept else []
            self.path.write_bytes(b"".join(kept))
        self.num_done = num_kept
        try:
            yield self
        except BaseException:
            # Also of Ctrl-C.
            if self.num_done:
                done = f"{self.num_done} of {len(self._rows)} completions are in {self.path}"
                print(f"{done}; the same command with --resume goes on", file=sys.stderr, flush=True)
            else:
                self.path.unlink()
            raise
        self.path.replace(self._output)

    def add(self, completions: Sequence[str]) -> None:
        """Write the completions of the prompts that follow."""
        rows = self._rows[self.num_done : self.num_done + len(completions)]
        text = "".join(
            json.dumps({**row, "completion": said}, ensure_ascii=False) + "\n"
            for row, said in zip(rows, completions, strict=True)
        )
        with refusing(f"{self.path} cannot be written: ", (OSError,)), self.path.open("ab") as file:
            file.write(text.encode())
        self.num_done += len(completions)


def _asked(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "completion"}


def _asked_in(line: bytes) -> Row | None:
    try:
        return _asked(json.loads(line))
    except (ValueError, AttributeError):
        return None
