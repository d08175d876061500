"""Extend a run in a folder to more steps than it had."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rp_trainer.finetuning.files import MODEL, create_output, earlier_model, earlier_options
from rp_trainer.finetuning.settings import Names

# Where options.json has the settings of the training.
SETTINGS = "settings"
_STEPS = "steps"


def earlier_steps(folder: Path) -> int | None:
    """Return how many steps the run in the folder has, or had at last; None if it does not say."""
    steps: object = earlier_options(folder).get(SETTINGS, {}).get(_STEPS)
    return steps if isinstance(steps, int) else None


def extend(folder: Path, steps: int, options: Mapping[str, Any], names: Names) -> Path | None:
    """Give the run in a folder so many steps; it then goes on with `InFolder`, from its newest checkpoint.

    Its model is kept beside; return where, or None if there is none yet. `options`: other JSON values that change.

    Raises `Refused` if the folder cannot be written to.
    """
    was = earlier_options(folder)
    # First: a run of more steps that has a model would count as finished.
    beside = _moved(folder, was[SETTINGS][_STEPS])
    create_output(folder, {**was, **options, SETTINGS: {**was[SETTINGS], _STEPS: steps}}, names)
    return beside


def _moved(folder: Path, steps: int) -> Path | None:
    model = folder / MODEL
    if not model.is_dir():
        return None
    beside = folder / earlier_model(steps)
    model.replace(beside)
    return beside
