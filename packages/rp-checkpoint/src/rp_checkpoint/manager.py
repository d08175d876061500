"""`CheckpointManager`: saves the checkpoints of one run, and keeps the last and the best of them."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rp_engine.errors import MachineFailed, in_words
from rp_errors import warn_user
from rp_optim.jobs import Worker

from rp_checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointWarning
from rp_checkpoint.files.disk import remove, remove_leftovers
from rp_checkpoint.files.manifest import description_of, is_finished
from rp_checkpoint.loading.load import LoadedCheckpoint, load_checkpoint
from rp_checkpoint.model.saveable import Saveable
from rp_checkpoint.saving.save import Optimizers, prepared
from rp_checkpoint.saving.saving import SavingCheckpoint

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class _Kept:
    """A finished checkpoint of a run; later ones compare greater."""

    step: int
    again: int
    path: Path


class CheckpointManager:
    """Saves one run's checkpoints in one folder, as ``step-00000100``, and finds the newest intact one.

    Args:
        folder: created if it does not exist. One process at a time saves in it.
        keep_last: the number of newest checkpoints to keep; None keeps all.
        best: whether the smallest (``"min"``) or the largest (``"max"``) `metric` is the best, which is kept, too.

    A checkpoint is removed only after a newer one is complete. The last `keep_last` that this manager saved are
    kept, too, even if the folder has later steps of another run, for which there is a `CheckpointWarning`. With
    ``wait=False`` (the default) a checkpoint is written while training continues. If that fails, the error is
    logged, the next `save` issues a `CheckpointWarning` with it, and `wait` raises it.

    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from roundpipe import RoundPipe, Runtime
    >>> with Runtime("cpu:1") as runtime, TemporaryDirectory() as folder:
    ...     model = RoundPipe(torch.nn.Linear(4, 4), runtime=runtime)
    ...     manager = CheckpointManager(folder, keep_last=1)
    ...     for step in (10, 20):
    ...         saving = manager.save(model, step=step)
    ...     manager.wait()
    ...     [path.name for path in manager.checkpoints()], manager.load_latest(model).step
    (['step-00000020'], 20)

    Raises `ValueError` for invalid arguments, `CheckpointError` if the folder cannot be created.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        best: Literal["min", "max"] | None = None,
    ) -> None:
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"keep_last must be at least 1, or None to keep all, but is {keep_last!r}")
        if best not in ("min", "max", None):
            raise ValueError(f"best must be 'min', 'max' or None, but is {best!r}")
        self.folder = Path(os.path.abspath(folder))
        self._keep_last = keep_last
        self._best = best
        self._saving: SavingCheckpoint | None = None
        # The checkpoints that this manager saved, in order.
        self._saved: list[Path] = []
        self._metrics: dict[Path, float | None] = {}
        # The checkpoints that were seen when the folder could be listed.
        self._seen: list[_Kept] = []
        # Ctrl-C does not enter this thread, so nothing is left half-removed.
        self._remover = Worker("roundpipe-checkpoint-remover")
        try:
            self._remover.submit(self._prepare).result()
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be used for checkpoints: {error}") from error

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def save(
        self,
        model: Saveable,
        optimizer: Optimizers = None,
        *,
        step: int,
        wait: bool = False,
        **options: Any,
    ) -> SavingCheckpoint:
        """Save a checkpoint, after waiting for the previous one; `options` are those of `save_checkpoint`.

        Raises what `save_checkpoint` raises.
        """
        self._finish_last()
        path = self._new_path(step)
        saving, begin = prepared(path, model, optimizer, step=step, **options)
        # Known before it begins: Ctrl-C may come before `begin` returns.
        self._saving = saving
        try:
            begin()
        except Exception:
            # Raised here, so not by `wait`.
            self._saving = None
            raise
        self._warn_of_later(step)
        if wait:
            self.wait()
        return saving

    def _warn_of_later(self, step: int) -> None:
        newest = self._those_seen()[-1:]
        if not self._saved and newest and newest[0].step > step:
            warn_user(
                f"{newest[0].path} is of a later step than {step}, which is saved now; load_latest loads the "
                "later one: use a separate folder for each run, or remove the checkpoints that are not needed",
                CheckpointWarning,
            )

    def _finish_last(self) -> None:
        """Wait for the last checkpoint; warn if it failed."""
        try:
            self.wait()
        except (CheckpointError, MachineFailed) as error:
            warn_user(f"an earlier checkpoint failed: {error}", CheckpointWarning)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk, then remove the checkpoints that need not be kept.

        Raises `CheckpointError`, once, if the checkpoint could not be written.
        """
        saving = self._saving
        if saving is None:
            return
        if not saving.is_begun():
            self._saving = None
            return
        try:
            saving.wait()
        finally:
            if saving.done():
                self._saving = None
        self._saved.append(saving.path)
        if saving.is_first:
            self._remover.submit(self._remove_old).wait()

    def _new_path(self, step: int) -> Path:
        name = f"step-{step:08}"
        taken = [kept.again for kept in self._those_seen() if kept.step == step]
        return self.folder / (f"{name}-{max(taken) + 1}" if taken else name)

    def _finished(self) -> list[_Kept]:
        """List the checkpoints with the completion marker, oldest first."""
        try:
            self._seen = sorted(self._parsed(os.listdir(self.folder)))
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error
        return self._seen

    def _those_seen(self) -> list[_Kept]:
        """Return the finished checkpoints; those of the last time, if the folder cannot be listed now.

        For what only chooses a name or warns: a checkpoint is written all the same, on all machines alike.
        """
        try:
            return self._finished()
        except CheckpointError as error:
            _LOG.warning("%s", error)
            return self._seen

    def _parsed(self, names: list[str]) -> Iterator[_Kept]:
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and is_finished(self.folder / name):
                yield _Kept(int(match[1]), int(match[2] or 0), self.folder / name)

    def checkpoints(self) -> list[Path]:
        """List the finished checkpoints, oldest first, without checking their files."""
        return [kept.path for kept in self._finished()]

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, the newest if several have it; None if none has a metric."""
        if self._best is None:
            return None
        sign = 1 if self._best == "max" else -1
        scored = [
            (sign * metric, kept)
            for kept in self._finished()
            if (metric := self._metric(kept.path)) is not None and not math.isnan(metric)
        ]
        return max(scored)[1].path if scored else None

    def _metric(self, path: Path) -> float | None:
        if path not in self._metrics:
            try:
                metric = description_of(path)["facts"]["metric"]
                self._metrics[path] = None if metric is None else float(metric)
            except OSError as error:
                # It may be read the next time.
                _LOG.warning("the metric of %s cannot be read: %s", path, in_words(error))
                return None
            except (ValueError, LookupError, TypeError) as error:
                _LOG.warning("%s has no metric that can be read: %s", path, in_words(error))
                self._metrics[path] = None
        return self._metrics[path]

    def _remove_old(self) -> None:
        """Remove the checkpoints that need not be kept. What cannot be removed is logged, and tried next time."""
        if self._keep_last is None:
            return
        try:
            remove_leftovers(self.folder)
            needed = {self.best(), *self._saved[-self._keep_last :]}
            finished = self._finished()
        except (CheckpointError, OSError) as error:
            # Not knowing which is the best, it removes none.
            _LOG.warning("no earlier checkpoint is removed: %s", error)
            return
        for kept in finished[: -self._keep_last]:
            # One whose metric could not be read may be the best.
            is_known = self._best is None or kept.path in self._metrics
            if is_known and kept.path not in needed:
                try:
                    remove(kept.path)
                except OSError as error:
                    _LOG.warning("the checkpoint %s cannot be removed: %s", kept.path, error)

    def load_latest(
        self,
        model: Saveable,
        optimizer: Optimizers = None,
        **options: Any,
    ) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint; None if there is none. `options` are those of `load_checkpoint`.

        For a damaged one a `CheckpointWarning` names the file, and the previous one is tried. If another process
        removes one meanwhile, since it has saved a newer one, the newer one is loaded.

        Raises what `load_checkpoint` raises, and `CheckpointDamaged` if there are only damaged ones.
        """
        self.wait()
        last: CheckpointError | MachineFailed | None = None
        tried: set[Path] = set()
        # Listed anew each time: a process that saves may have removed one for a newer one.
        while left := [kept.path for kept in self._finished() if kept.path not in tried]:
            tried.add(left[-1])
            try:
                return load_checkpoint(left[-1], model, optimizer, **options)
            except (CheckpointError, MachineFailed) as error:
                last = error
                if is_finished(left[-1]):
                    if not _is_damage(error):
                        raise
                    words = f"not loaded, the previous one is tried: {error}"
                    warn_user(words, CheckpointWarning)
        if last is not None:
            raise last
        return None


def _is_damage(error: CheckpointError | MachineFailed) -> bool:
    """Whether a checkpoint is damaged, as this machine or another one has found."""
    return isinstance(error, CheckpointDamaged) or (
        isinstance(error, MachineFailed) and CheckpointDamaged.__name__ in str(error)
    )
