"""Ctrl-C wherever it can come while a checkpoint is saved: no descriptor, thread or folder is left over."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpointing import equal, job
from examples import examples
from lull import pause
from roundpipe import CheckpointManager, Runtime, load_checkpoint, save_checkpoint
from rp_checkpoint import check
from test_interrupts import SWALLOWED, sweep

pytestmark = [pytest.mark.untraced, SWALLOWED, pytest.mark.slow, pytest.mark.timeout(600)]


def descriptors() -> set[str]:
    """What this process has open."""
    found = set[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # that of the list itself
    return found


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "checkpoint" in thread.name}


def settled() -> None:
    """Wait until all other threads sleep, and what nobody holds is gone."""
    pause()
    gc.collect()
    pause()


def swept(save: Callable[[int], object], folder: Path, after: Callable[[], object], *, dense: int) -> set[str]:
    """Save again and again, with an interrupt at one point after another; return where they came.

    `after`: called after each. `dense`: so many of the first points are all tried.
    """
    save(0)
    settled()
    before, kept, seen, nth = descriptors(), threads(), set[str](), 0
    while (where := sweep(partial(save, nth + 1), nth)) is not None:
        seen.add(where)
        after()
        settled()
        assert descriptors() == before, f"interrupted in {where}"
        assert threads() == kept, f"interrupted in {where}"
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert hidden == [], f"interrupted in {where}"
        # Every one under the thorough profile.
        nth += (1 if nth < dense else 7) * (100 // examples(100))
    return seen


def test_an_interrupted_save_leaves_a_whole_checkpoint_or_none(two: Runtime, tmp_path: Path) -> None:
    own = job(two)
    own.train(0, 1)

    def save(nth: int) -> None:
        save_checkpoint(tmp_path / f"step-{nth}", own.model, own.optimizer, **own.parts)

    seen = swept(save, tmp_path, own.model.synchronize, dense=100)

    assert any("prepared" in where or "SavingCheckpoint" in where for where in seen)
    assert any("wait" in where for where in seen)
    assert len(seen) > 15
    made = sorted(tmp_path.iterdir())
    assert 1 < len(made) < len(seen) + 50
    for path in made:
        check(path)
    load_checkpoint(made[-1], own.model, own.optimizer, **own.parts)
    own.train(1, 2)


def test_a_manager_goes_on_after_an_interrupted_save_of_the_same_step(two: Runtime, tmp_path: Path) -> None:
    own = job(two)
    own.train(0, 1)
    manager = CheckpointManager(tmp_path, keep_last=2)

    def save(_: int) -> None:
        manager.save(own.model, own.optimizer, step=1, **own.parts)
        manager.wait()

    def again() -> None:
        manager.wait()
        save(0)

    seen = swept(save, tmp_path, again, dense=50)

    assert any("CheckpointManager" in where for where in seen)
    assert len(manager.checkpoints()) == 2
    weights = own.weights()
    own.train(1, 2)
    assert manager.load_latest(own.model, own.optimizer, **own.parts) is not None
    assert equal(own.weights(), weights)
