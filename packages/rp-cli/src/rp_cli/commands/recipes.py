"""The command `roundpipe recipes`: list the recipes that fit a machine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from rp_engine.estimates import current_limit

from rp_cli.planning.options import RecipesOptions
from rp_cli.recipes.catalogue import Recipe, recipes

_GB = 10**9
_START = "start one by: roundpipe train --config recipe:NAME --data DATA --output FOLDER"


@dataclass(frozen=True, slots=True)
class _Machine:
    """What a machine has. `ram_bytes`: infinite if it is unknown."""

    name: str
    devices: int
    device_bytes: int
    ram_bytes: float

    def fits(self, recipe: Recipe) -> bool:
        """Return whether it has what the recipe needs."""
        return recipe.fits(devices=self.devices, device_bytes=self.device_bytes, ram_bytes=self.ram_bytes)

    @property
    def words(self) -> str:
        """The machine in words."""
        ram = f"{self.ram_bytes / _GB:.0f} GB of RAM" if math.isfinite(self.ram_bytes) else "enough RAM"
        gpus = f"{self.devices} x {self.name}" if self.devices else self.name
        return f"{gpus}, {ram}"


def list_recipes(options: RecipesOptions) -> None:
    """Print the recipes that fit the machine that the options describe, or this one."""
    machine = _machine(options)
    found = [one for one in recipes().values() if options.all or machine.fits(one)]
    print(_as_json(found, machine) if options.json else _as_text(found, machine, len(recipes())), flush=True)


def _machine(options: RecipesOptions) -> _Machine:
    if options.card is not None:
        ram = math.inf if options.ram_bytes is None else options.ram_bytes
        return _Machine(options.card.name, options.devices or 1, options.card.memory_bytes, ram)
    ram = current_limit().total_bytes if options.ram_bytes is None else options.ram_bytes
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return _Machine("no GPU", 0, 0, ram)
    cuda: Any = torch.cuda  # torch does not annotate what it returns
    sizes: list[int] = [cuda.get_device_properties(at).total_memory for at in range(count)]
    return _Machine(torch.cuda.get_device_name(0), min(options.devices or count, count), min(sizes), ram)


def _as_text(found: list[Recipe], machine: _Machine, count: int) -> str:
    width = max((len(one.name) for one in found), default=0)
    lines = [f"  {one.name:<{width}}  {_needs(one):<27}  {one.what}" for one in found]
    fitting = sum(map(machine.fits, found))
    head = f"{fitting} of {count} recipes fit this: {machine.words}"
    more = "" if fitting == count else "; --all lists all, --gpu, --devices and --ram describe another machine"
    return "\n".join([head + more, *lines, _START])


def _needs(recipe: Recipe) -> str:
    return f"{recipe.devices} x {recipe.device_gb} GB, {recipe.ram_gb} GB of RAM"


def _as_json(found: list[Recipe], machine: _Machine) -> str:
    return json.dumps(
        [
            {
                "name": one.name,
                "what": one.what,
                "fits": machine.fits(one),
                "devices": one.devices,
                "device_memory_bytes": one.device_gb * _GB,
                "ram_bytes": one.ram_gb * _GB,
                "file": str(one.path),
            }
            for one in found
        ]
    )
