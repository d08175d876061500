"""The code of a page of the documentation.

A block marked ``python`` runs. So does a comment that begins with ``<!-- run``, which readers do not see: it sets
things up before a block, or checks what it did. A block marked ``py`` needs what is not installed here, such as
DeepSpeed, and is only compiled.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[2]
_RUN = re.compile(r"^```python\n(.*?)^```$|^<!-- run\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
_COMPILED = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text: str, pattern: re.Pattern[str] = _RUN, name: str = "page") -> list[CodeType]:
    """Each block, compiled with the line numbers of the page."""
    found: list[CodeType] = []
    for match in pattern.finditer(text):
        start = text[: match.start()].count("\n") + 1
        source = "".join(filter(None, match.groups()))
        found.append(compile("\n" * start + source, name, "exec"))
    return found


def run(text: str, name: str = "page") -> dict[str, Any]:
    """Run all that runs, in one namespace, which is returned."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks(text, name=name):
        exec(code, names)
    return names


def compiled_only(text: str, name: str = "page") -> list[CodeType]:
    """What is only compiled."""
    return blocks(text, _COMPILED, name)
