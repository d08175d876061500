"""The options of a run, as its model's card has them."""

from __future__ import annotations

from typing import Any

from rp_export.card import without_folders
from rp_sources.sources import Source

from rp_cli.finetune.options import FineTuning
from rp_cli.options.declared import declared
from rp_cli.options.kinds import OFF


def recipe_of(source: Source) -> dict[str, Any]:
    """Return the options that a run was given or chose, as in a file for --config; of places, their names."""
    recipe = source.recipe
    return {
        one.name: True
        if one.kind is OFF
        else without_folders(recipe[field])
        if one.kind.is_place
        else recipe[field]
        for field, one in declared(FineTuning).items()
        # A flag that turns something off is given where the field is off.
        if one.in_files and recipe.get(field) not in (None, one.kind is OFF, [])
    }
