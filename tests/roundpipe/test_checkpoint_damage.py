"""Checkpoints that are not as they were written are refused by the file's name; full disks cost no training."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Job, equal, job
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from roundpipe import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    Runtime,
    load_checkpoint,
    save_checkpoint,
)
from rp_checkpoint import check
from rp_checkpoint.files import tensor_file

HALF = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Job]]:
    """A checkpoint of several files after an asynchronous step, and a training to load it into."""
    folder = tmp_path_factory.mktemp("whole")
    with Runtime("cpu:1") as runtime:
        own = job(runtime, scaler=True, **HALF)
        own.train(0, 2)
        save_checkpoint(folder / "c", own.model, own.optimizer, step=2, shard_bytes=400, **own.parts)
        yield folder / "c", own


def load(own: Job, path: Path) -> Any:
    return load_checkpoint(path, own.model, own.optimizer, **own.parts)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    place = int(at * (len(content) - 1))
    content[place] ^= 1 << int(at * 1e6) % 8
    path.write_bytes(content)


def cut(path: Path, at: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(at * len(content))])


def lengthen(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes() + bytes(1 + int(at * 10)))


def delete(path: Path, at: float) -> None:
    del at
    path.unlink()


def exchange(path: Path, at: float) -> None:
    """Swap it with another file of the checkpoint."""
    others = files(next(folder for folder in path.parents if folder.name == "c"))
    other = others[int(at * len(others))]
    content = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(content)


DAMAGES = [flip, cut, lengthen, delete, exchange]


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.sampled_from(DAMAGES), which=st.integers(0, 10**6), at=st.floats(0, 0.999))
def test_a_folder_that_was_changed_anywhere_is_refused_with_the_files_name(
    whole: tuple[Path, Job],
    tmp_path_factory: pytest.TempPathFactory,
    damage: Callable[[Path, float], None],
    which: int,
    at: float,
) -> None:
    path, own = whole
    hurt = tmp_path_factory.mktemp("hurt") / "c"
    shutil.copytree(path, hurt)
    every = files(hurt)
    chosen = every[which % len(every)]
    before = {file: file.read_bytes() for file in every}
    damage(chosen, at)
    changed = [file for file in every if not file.exists() or file.read_bytes() != before[file]]
    if not changed:
        check(hurt)
        return
    with pytest.raises(CheckpointDamaged) as caught:
        load(own, hurt)
    assert any(str(file) in str(caught.value) for file in changed) or "manifest.json" in str(caught.value)


def test_a_damaged_checkpoint_changes_nothing(whole: tuple[Path, Job], tmp_path: Path) -> None:
    path, own = whole
    shutil.copytree(path, tmp_path / "c")
    flip(tmp_path / "c/roundpipe/training.json", 0.5)
    before = own.weights()
    with pytest.raises(CheckpointDamaged, match=r"training\.json was changed"):
        load(own, tmp_path / "c")
    assert equal(own.weights(), before)


def test_files_of_two_checkpoints_are_not_mixed(whole: tuple[Path, Job], tmp_path: Path) -> None:
    path, own = whole
    load(own, path)
    own.train(2, 3)
    save_checkpoint(tmp_path / "later", own.model, own.optimizer, step=3, shard_bytes=400, **own.parts)
    for name in ("model-00001-of-00001.safetensors", "roundpipe/training.json", "roundpipe/manifest.json"):
        mixed = tmp_path / name.replace("/", "-")
        shutil.copytree(tmp_path / "later", mixed)
        chosen = mixed / name if (mixed / name).exists() else min(mixed.glob("model*.safetensors"))
        shutil.copy(path / chosen.relative_to(mixed), chosen)
        with pytest.raises(CheckpointDamaged, match=chosen.name):
            load(own, mixed)


def test_no_checkpoint_at_all_is_refused(whole: tuple[Path, Job], tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match=r"complete is missing, so this is not a finished checkpoint"):
        load(whole[1], tmp_path)
    with pytest.raises(CheckpointDamaged, match="complete is missing"):
        load(whole[1], tmp_path / "nowhere")


def test_a_folder_of_checkpoints_is_refused_with_the_way_to_load_the_newest(
    whole: tuple[Path, Job], tmp_path: Path
) -> None:
    for name in ("step-00000002", "step-00000001"):
        shutil.copytree(whole[0], tmp_path / name)
    os.utime(tmp_path / "step-00000001" / "roundpipe" / "complete", ns=(1, 1))
    with pytest.raises(
        CheckpointError, match=r"load_latest\(model, optimizer\), or name one, such as .*step-00000002"
    ):
        load(whole[1], tmp_path)


# File systems that fail

CALLS: list[tuple[Any, str]] = [
    (os, "open"),
    (os, "pwrite"),
    (os, "fsync"),
    (os, "rename"),
    (os, "mkdir"),
    (os, "close"),
    (io, "open"),
    (builtins, "open"),
]


class Failing:
    """Counts the calls of the file system that concern a folder, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, fails_at: int, number: int) -> None:
        self.count = 0
        self.failed: str | None = None
        self._folder, self._at, self._number = folder, fails_at, number
        self._known: set[int] = set()
        for owner, name in CALLS:
            patch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(first: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._concerns(first):
                return call(first, *args, **kwargs)
            self.count += 1
            if self.count == self._at:
                self.failed = name
                if name == "close":
                    call(first)
                raise OSError(self._number, os.strerror(self._number))
            found = call(first, *args, **kwargs)
            if name == "close":
                self._known.discard(first)
            if name == "open" and isinstance(found, int):
                self._known.add(found)
            return found

        return watched

    def _concerns(self, first: Any) -> bool:
        if isinstance(first, int):
            return first in self._known
        return str(self._folder) in os.fspath(first) if isinstance(first, str | os.PathLike) else False


def save_failing(own: Job, folder: Path, at: int, number: int) -> tuple[Failing, BaseException | None]:
    manager = CheckpointManager(folder, keep_last=1)
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, folder, at, number)
        try:
            manager.save(own.model, own.optimizer, step=9, wait=True, shard_bytes=400, **own.parts)
        except CheckpointError as error:
            return failing, error
    return failing, None


EVERY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("number", "steps"),
    [
        (errno.ENOSPC, 5),
        (errno.EROFS, 11),
        pytest.param(errno.ENOSPC, 1, marks=EVERY),
        pytest.param(errno.EROFS, 1, marks=EVERY),
        pytest.param(errno.EIO, 1, marks=EVERY),
    ],
)
def test_whatever_call_of_the_file_system_fails_training_goes_on_and_the_last_checkpoint_stays(
    whole: tuple[Path, Job], tmp_path: Path, number: int, steps: int
) -> None:
    path, own = whole
    load(own, path)
    shutil.copytree(path, tmp_path / "run/step-00000002")
    untroubled, _ = save_failing(own, tmp_path / "run", 0, number)
    assert untroubled.count > 30
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(path, tmp_path / "run/step-00000002")
    failed: set[str] = set()
    for at in range(1, untroubled.count + 1, steps):
        load(own, path)
        failing, error = save_failing(own, tmp_path / "run", at, number)
        failed.add(failing.failed or "")
        kept = CheckpointManager(tmp_path / "run").checkpoints()
        if error is None:
            # What failed came after the new one was whole: removing the old one.
            assert [found.name for found in kept][-1] == "step-00000009"
            shutil.rmtree(tmp_path / "run/step-00000009")
            shutil.copytree(path, tmp_path / "run/step-00000002", dirs_exist_ok=True)
        else:
            assert "could not be written" in str(error) or "cannot be" in str(error), error
            # The last rename may have happened before the folder was synced: the new one is whole then.
            assert (tmp_path / "run/step-00000002") in kept
            for found in kept:
                check(found)
            shutil.rmtree(tmp_path / "run/step-00000009", ignore_errors=True)
        own.train(2, 3)
    # Threads that write make their calls in any order, so some kinds may be left out of a part of them.
    assert {"open", "pwrite", "fsync", "rename", "mkdir"} <= failed or steps > 1
    assert failed - {""}


def test_a_checkpoint_that_fails_in_the_background_is_told_and_training_goes_on(
    tmp_path: Path, two: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = job(two)
    wanted = truth.train(0, 6)
    own = job(two)
    manager = CheckpointManager(tmp_path)
    found = own.train(0, 2)
    manager.save(own.model, own.optimizer, step=2, wait=True)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        found += own.train(2, 3)
        saving = manager.save(own.model, own.optimizer, step=3)
        found += own.train(3, 4)
        with pytest.raises(
            CheckpointError, match="could not be written: No space left on device; training can go on"
        ):
            saving.wait()
    assert "No space left on device" in caplog.text
    with pytest.warns(CheckpointWarning, match="an earlier checkpoint failed: .*No space left"):
        manager.save(own.model, own.optimizer, step=4)
    found += own.train(4, 6)
    manager.wait()
    assert found == wanted
    assert [path.name for path in manager.checkpoints()] == ["step-00000002", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_file_that_cannot_be_read_half_way_stops_training_until_a_state_is_loaded(
    whole: tuple[Path, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = whole
    load(own, path)
    read = os.preadv

    def vanished(file: int, *args: Any) -> int:
        if "masters" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(file, *args)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file.os, "preadv", vanished)
        with pytest.raises(CheckpointError, match=r"cannot be read: .*Stale file handle"):
            load(own, path)
    with pytest.raises(RuntimeError, match="a checkpoint was loaded only in part"):
        own.train(2, 3)
    load(own, path)
    own.train(2, 3)


def test_leftovers_of_ended_processes_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    ended = tmp_path / f".saving-step-00000001-{host}-999999999-abcdef01"
    other = tmp_path / ".saving-step-00000001-elsewhere-999999999-abcdef01"
    running = tmp_path / f".saving-step-00000001-{host}-{os.getpid()}-abcdef01"
    for folder in (ended, other, running):
        folder.mkdir()
    CheckpointManager(tmp_path)
    assert not ended.exists()
    assert other.exists()
    assert running.exists()
