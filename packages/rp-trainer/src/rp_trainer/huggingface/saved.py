"""Checkpoints of a trainer: complete folders of RoundPipe, to which `Trainer` adds its own files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from roundpipe import AutoRoundPipe, RoundPipe, load_checkpoint, save_checkpoint
from rp_checkpoint import is_finished

from rp_trainer.optimizer import SteppedByEngine

Engine = RoundPipe | AutoRoundPipe
_NAME = re.compile(r"checkpoint-(\d+)")
# The last file that `Trainer` writes.
_LAST = "trainer_state.json"


def is_ours(folder: str | Path) -> bool:
    """Return whether RoundPipe wrote and finished this checkpoint."""
    return is_finished(Path(folder))


def save(folder: str, engine: Engine, optimizer: SteppedByEngine, scheduler: Any, step: int) -> None:
    """Write the model, its masters and the optimizer; the folder appears only when complete.

    Removes an existing folder of an earlier run. Raises what `roundpipe.save_checkpoint` raises.
    """
    if Path(folder).exists():
        shutil.rmtree(folder)
    save_checkpoint(folder, engine, optimizer.exposed(), schedulers=scheduler, step=step)


def load(folder: str, engine: Engine, optimizer: SteppedByEngine, scheduler: Any) -> None:
    """Load a checkpoint of `save`. Raises what `roundpipe.load_checkpoint` raises.

    `Trainer` restores the random number generators itself, when the data begins.
    """
    load_checkpoint(folder, engine, optimizer.exposed(), schedulers=scheduler, random=False)
    optimizer.follow()


def newest(folder: str) -> str | None:
    """Return the newest checkpoint in a run's folder that `Trainer` has finished; None without one."""
    numbered = [
        (int(name[1]), path) for path in Path(folder).glob("checkpoint-*") if (name := _NAME.fullmatch(path.name))
    ]
    return next((str(path) for _, path in sorted(numbered, reverse=True) if _is_finished(path)), None)


def _is_finished(path: Path) -> bool:
    try:
        json.loads((path / _LAST).read_bytes())
    except (OSError, ValueError):
        return False
    return True
