"""The recipes that come with the command: their names, what they need, and where they are."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rp_trainer.errors import Refused

PREFIX = "recipe:"
_HERE = Path(__file__).parent
_HEAD = re.compile(
    r"# (?P<what>.+)\.\n"
    r"# needs: (?P<devices>\d+) x (?P<device_gb>\d+)GB, RAM (?P<ram_gb>\d+)GB\n"
    r"# configuration: (?P<configuration>\S+)\n"
)
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file of options. `what`: a line on it. `devices`, `device_gb`, `ram_gb`: the least machine, in 10^9 bytes.

    `configuration`: the model's ``config.json``, so that it can be planned for without a network.
    """

    name: str
    what: str
    devices: int
    device_gb: int
    ram_gb: int
    configuration: Path

    @property
    def path(self) -> Path:
        """The file, which ``--config`` takes."""
        return _HERE / f"{self.name}.yaml"

    def fits(self, *, devices: int, device_bytes: int, ram_bytes: float) -> bool:
        """Return whether a machine has what the recipe needs.

        >>> recipe_named("qwen3-8b-lora-1x24gb").fits(devices=2, device_bytes=24 * 2**30, ram_bytes=64 * 10**9)
        True
        """
        return devices >= self.devices and device_bytes >= self.device_gb * _GB and ram_bytes >= self.ram_gb * _GB


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by their names, in order of these."""
    files = {path.stem: path for path in _HERE.glob("*.yaml")}
    return {name: _read(files[name]) for name in sorted(files)}


def recipe_named(name: str) -> Recipe:
    """Return a recipe. Raises `Refused` for a name that none has, with the nearest."""
    if name not in recipes():
        nearest = difflib.get_close_matches(name, recipes(), n=1)
        hint = f"the nearest one is {nearest[0]}" if nearest else "`roundpipe recipes --all` lists them"
        raise Refused(f"there is no recipe {name!r:.60}; {hint}")
    return recipes()[name]


def file_of(text: str) -> Path:
    """Return the file that ``--config`` names: a path, or ``recipe:NAME``.

    >>> file_of("recipe:qwen3-8b-full-8x24gb").name, file_of("mine.yaml").name
    ('qwen3-8b-full-8x24gb.yaml', 'mine.yaml')
    """
    return recipe_named(text.removeprefix(PREFIX)).path if text.startswith(PREFIX) else Path(text)


def _read(path: Path) -> Recipe:
    match = _HEAD.match(path.read_text())
    assert match is not None, path
    numbers = {name: int(match[name]) for name in ("devices", "device_gb", "ram_gb")}
    configuration = _HERE / "configurations" / match["configuration"] / "config.json"
    return Recipe(path.stem, match["what"], configuration=configuration, **numbers)
