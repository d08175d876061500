"""What is kept of a run: nothing, or checkpoints, metrics and the model in a folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from roundpipe import CheckpointManager
from rp_checkpoint import description_of, is_finished
from rp_checkpoint.errors import CheckpointError
from rp_engine.errors import MachineFailed

from rp_trainer.errors import Refused, ToldElsewhere, Unwritable
from rp_trainer.finetuning.extending import SETTINGS
from rp_trainer.finetuning.files import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    create_output,
    earlier_options,
    finished_files,
    has_run,
    remove_results,
    writing,
)
from rp_trainer.finetuning.folder import Folder
from rp_trainer.finetuning.reports import Metrics, Report
from rp_trainer.finetuning.settings import Settings
from rp_trainer.finetuning.training import Training

_LOG = logging.getLogger(__name__)
# How often a last checkpoint is tried.
_ATTEMPTS = 3
# What is raised if a checkpoint cannot be written, on this machine or on another one.
_UNSAVED = (CheckpointError, MachineFailed, Unwritable, ToldElsewhere)


class KeepsNothing:
    """Keeps nothing: the model is trained in memory. It has all that the loop asks of what is kept.

    All processes call the same methods in the same order.
    """

    def is_finished(self, settings: Settings) -> bool:
        """Return whether the run has ended already."""
        del settings
        return False

    def begin(self, training: Training) -> int:
        """Begin with the first step."""
        del training
        return 0

    def reports(self, after: int | None) -> Sequence[Report]:
        """Open none."""
        del after
        return ()

    def moved(self) -> Path | None:
        """See that the place is still there; return where it is now, if that has changed."""

    def save_if_due(self, step: int, loss: float | None, *, is_saved: bool = False) -> None:
        """Save a checkpoint if it is time. `is_saved`: the step has a checkpoint, but without a loss."""

    def best(self, step: int) -> str:
        """Return where the weights of an earlier step are."""
        del step
        return "is not kept"

    def stop(self, done: int) -> str:
        """Save what is needed to go on after an interruption; return what to tell of it."""
        return "nothing is kept" if done else "nothing is lost"

    def finish(self, done: int) -> Unwritable | None:
        """Write what remains and the model; return the error of a checkpoint that could not be written."""


class InFolder:
    """Keeps checkpoints, metrics and the trained model in the folder of a run.

    Args:
        folder: from `taken`.
        write_model: writes the model into a folder that it creates, such as
            ``model.named_model.save_pretrained``.
        options: JSON values to write down in ``options.json``.
        extend: gives a run that goes on more steps, once its checkpoint is loaded: a refusal before that must
            leave its model and options as they were. Given on all machines; called on the first.

    Unless the folder was taken with ``resume=True``, the results of an earlier run in it are removed.
    """

    def __init__(
        self,
        folder: Folder,
        write_model: Callable[[Path], object],
        *,
        options: Mapping[str, Any] | None = None,
        extend: Callable[[], object] | None = None,
    ) -> None:
        self._folder, self._write_model, self._extend = folder, write_model, extend
        self._options, self._resume, self._names = options or {}, folder.resume, folder.names
        self._changes_seen = 0
        self._saved_step: int | None = None
        self._lowest: float | None = None
        self._saved_at = time.monotonic()

    # Begin and resume

    def is_finished(self, settings: Settings) -> bool:
        """Return whether the folder has a run that goes on, but has ended already: its model is there.

        Raises `Refused` if that run had other settings.
        """
        if self._extend or not (self._goes_on() and (self._folder.folder / MODEL).is_dir()):
            return False
        self._refuse_other(settings)
        return True

    def _goes_on(self) -> bool:
        return self._resume and has_run(self._folder.folder)

    def begin(self, training: Training) -> int:
        """Prepare the folder; load the newest intact checkpoint of a run that goes on, and return its step.

        Raises `Refused` if none can be loaded, or if the folder cannot be used.
        """
        self._training, self._processes = training, training.processes
        goes_on = self._processes.lead(self._made)
        self.manager = self._processes.all(self._manager)
        done = self._loaded() if goes_on else 0
        if self._extend:
            self._processes.lead(self._extend)
        self._processes.lead(self._folder.note_options)
        if self._resume:
            _LOG.info(*(("goes on after step %d", done) if done else ("no checkpoint yet: begins with step 1",)))
        return done

    def _made(self) -> bool:
        """Prepare the folder; return whether a run in it is resumed."""
        folder = self._folder.folder
        goes_on, settings = self._goes_on(), self._training.settings
        if goes_on:
            self._refuse_other(settings)
        else:
            remove_results(folder, self._names)
            create_output(folder, {**self._options, SETTINGS: settings.told()}, self._names)
        return goes_on

    def _refuse_other(self, settings: Settings) -> None:
        was: Mapping[str, object] = earlier_options(self._folder.folder).get(SETTINGS, {})
        for name, value in settings.told().items():
            if was.get(name, value) != value and not (self._extend and name == "steps"):
                raise Refused(
                    f"{self._names.resume} needs the same settings, but {name} was {was[name]} and is {value}; "
                    "set it as it was, or name another folder"
                )

    def _manager(self) -> CheckpointManager:
        keep = self._training.settings.keep
        try:
            return CheckpointManager(self._folder.folder / CHECKPOINTS, keep_last=keep, best="min")
        except CheckpointError as error:
            raise Refused(str(error)) from error

    def _loaded(self) -> int:
        try:
            loaded = self.manager.load_latest(self._training.model, self._training.optimizer.exposed())
        except CheckpointError as error:
            raise Refused(f"{self._names.resume}: {error}") from error
        if loaded is None:
            return 0
        self._training.optimizer.follow()
        self._saved_step, self._lowest = loaded.step, loaded.data["lowest_loss"]
        self._training.owes_evaluation = loaded.data.get("owes_evaluation", False)
        self._training.patience.load(loaded.data.get("patience"))
        return loaded.step

    def reports(self, after: int | None) -> Sequence[Report]:
        """Open the metrics, if the settings ask for them, from the beginning or after a step."""
        if not self._training.settings.metrics:
            return ()
        return (Metrics(self._folder.folder / METRICS, self._names, after=after),)

    # While it trains

    def moved(self) -> Path | None:
        """See that the folder is there and has the checkpoints; return it if it is another one now."""
        self._folder.keep()
        self._follow()
        seen, self._changes_seen = self._changes_seen, self._folder.changes
        return None if seen == self._changes_seen else self._folder.folder

    def save_if_due(self, step: int, loss: float | None, *, is_saved: bool = False) -> None:
        """Save a checkpoint if the number of steps or minutes says so, or for the lowest held-out loss so far."""
        every = self._training.settings.save_every
        is_best = loss is not None and (self._lowest is None or loss < self._lowest)
        self._lowest = loss if is_best else self._lowest
        if is_saved and not is_best:
            return
        if is_best or (every is not None and step % every == 0) or self._is_time():
            self._try_to_save(step, loss)

    def _try_to_save(self, step: int, loss: float | None) -> None:
        """Save a checkpoint; if it cannot be, that is logged, and tried again the next time."""
        try:
            self._save(step, loss)
        except _UNSAVED as error:
            if self._processes.is_first:
                _LOG.warning("%s; it is tried again at the next time", error)

    def _is_time(self) -> bool:
        """Return whether a checkpoint is due by the first machine's clock."""
        wanted = self._training.settings.save_minutes
        return wanted is not None and self._processes.lead(
            lambda: (time.monotonic() - self._saved_at) / 60 >= wanted
        )

    def _save(self, step: int, loss: float | None) -> None:
        self._saved_step, self._saved_at = None, time.monotonic()
        # Nothing is written to a folder that is not this run's any more.
        self._processes.lead(self._check_folder)
        training = self._training
        data = {
            "num_microbatch": training.model.model_run_config.num_microbatch,
            "lowest_loss": self._lowest,
            "owes_evaluation": training.owes_evaluation,
            "patience": training.patience.state(),
        }
        self.manager.save(training.model, training.optimizer.exposed(), step=step, data=data, metric=loss)
        self._saved_step = step

    def _check_folder(self) -> None:
        self._folder.ready()
        self._follow()

    def _follow(self) -> None:
        self.manager.folder = (self._folder.folder / CHECKPOINTS).absolute()

    # At the end

    def best(self, step: int) -> str:
        """Return where the weights of an earlier step are."""
        with suppress(*_UNSAVED):
            self.manager.wait()
        kept = [path for path in self.manager.checkpoints() if checkpoint_step(path) == step]
        return f"is kept in {kept[0]}" if kept else "has no checkpoint"

    def stop(self, done: int) -> str:
        """Save a checkpoint, and return how to go on. Raises `Unwritable`."""
        if not done:
            return "nothing is lost"
        try:
            self._save_now(done)
        except Unwritable as error:
            raise Unwritable(f"{error}; {self._how_to_go_on()}") from error
        return f"a checkpoint is saved: {self._folder.to_resume()} goes on"

    def finish(self, done: int) -> Unwritable | None:
        """Write the last checkpoint and the model, in a folder beside if it cannot be in this one."""
        unwritten = self._last_checkpoint(done)
        self._training.model.synchronize()
        try:
            self._processes.lead(self._write)
        except (Unwritable, ToldElsewhere) as error:
            self._write_beside(done, error)
        place = self._folder.folder / MODEL
        _LOG.info("the model is in %s", place)
        if self._folder.beside:
            return unwritten or Unwritable(f"{self._folder.beside}; the model is in {place} instead")
        return unwritten

    def _last_checkpoint(self, done: int) -> Unwritable | None:
        """Wait for the last checkpoint; if it failed, save one now. Return the error if that failed, too."""
        try:
            self.manager.wait()
        except (CheckpointError, MachineFailed):
            try:
                self._save_now(done)
            except ToldElsewhere:
                return None
            except Unwritable as error:
                # The model has fewer bytes than a checkpoint, so it may find room where that did not.
                return Unwritable(f"{self._names.folder} {self._folder.folder}: {error}")
        return None

    def _save_now(self, step: int) -> None:
        """Save a checkpoint, unless this step has one, and wait until it is on the disk.

        An error of the system may be gone a moment later, so it is tried twice, and then in a folder beside this
        one. Raises `Unwritable` if it cannot be written, on other machines `ToldElsewhere`.
        """
        for _ in range(_ATTEMPTS - 1):
            with suppress(*_UNSAVED):
                self._save_whole(step)
                return
        self._move_beside()
        try:
            self._save_whole(step)
        except _UNSAVED as error:
            if isinstance(error, ToldElsewhere):
                raise
            raise Unwritable(str(error)) from error

    def _save_whole(self, step: int) -> None:
        if self._saved_step != step:
            self._save(step, None)
        try:
            self.manager.wait()
        except _UNSAVED:
            self._saved_step = None
            raise

    def _move_beside(self) -> None:
        """Go on in a folder beside this one, if there can be one."""

        def move() -> None:
            with suppress(Unwritable):
                self._folder.move_beside()
            self._follow()

        self._processes.lead(move)

    def _how_to_go_on(self) -> str:
        """Return what is true of the last checkpoint that there is."""
        try:
            steps = [checkpoint_step(path) for path in self.manager.checkpoints()]
        except CheckpointError as error:
            return f"whether there is an earlier one is unknown: {error}"
        again = self._folder.to_resume()
        if not steps:
            return f"there is no earlier one: make room, and {again} begins with step 1"
        return f"make room, and {again} goes on after step {steps[-1]}"

    def _write(self, attempts: int = 2) -> None:
        """Write the model. An error of the system may be gone a moment later, so it is tried again."""
        for left in reversed(range(attempts)):
            try:
                folder = self._folder.ready()
                what = f"{self._names.folder} {folder}: the model"
                with writing(what), finished_files(folder) as unfinished:
                    self._write_model(unfinished / MODEL)
            except Unwritable:
                if not left:
                    raise
            else:
                return

    def _write_beside(self, done: int, error: Unwritable | ToldElsewhere) -> NoReturn:
        """Write the model in a folder beside, or a checkpoint instead; raise an error that says so."""
        self._move_beside()
        try:
            self._processes.lead(lambda: self._write(attempts=1))
        except (Unwritable, ToldElsewhere) as last:
            self._save_instead(done, last)
        if isinstance(error, ToldElsewhere):
            raise error
        raise Unwritable(f"{error}; the model is in {self._folder.folder / MODEL} instead") from error

    def _save_instead(self, done: int, error: Unwritable | ToldElsewhere) -> NoReturn:
        """Save a checkpoint of the end, from which the model can be written later, and raise the error."""
        with suppress(Unwritable):
            self._save_now(done)
        if isinstance(error, ToldElsewhere):
            raise error
        raise Unwritable(f"{error}; {self._how_to_go_on()}") from error


Kept = KeepsNothing | InFolder


def checkpoint_microbatches(folder: Path) -> int | None:
    """Return the number of microbatches of a run's newest checkpoint; None if there is none."""
    for path in sorted((folder / CHECKPOINTS).glob("step-*"), reverse=True):
        if is_finished(path):
            try:
                return description_of(path)["facts"]["data"]["num_microbatch"]
            except (OSError, ValueError, LookupError, TypeError):
                continue
    return None


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint, from its name.

    >>> checkpoint_step(Path("run/checkpoints/step-00000040-1"))
    40
    """
    return int(path.name.split("-")[1])
