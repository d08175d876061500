"""`fine_tune`: train a wrapped model step by step, evaluate it, and keep what is to be kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from roundpipe import RoundPipe, ShortCollections, profile

from rp_trainer.errors import Diverged, Refused, Unwritable
from rp_trainer.finetuning.batches import Batches
from rp_trainer.finetuning.evaluation import Evaluation
from rp_trainer.finetuning.files import create_profile, writing
from rp_trainer.finetuning.kept import KeepsNothing, Kept
from rp_trainer.finetuning.reports import Report, Reports
from rp_trainer.finetuning.settings import Settings
from rp_trainer.finetuning.training import Training, spoilt_weight
from rp_trainer.processes import ALONE, Processes
from rp_trainer.stopping import Interrupted, Interruption

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainingOutcome:
    """What a training has come to: the number of `steps` done, and the held-out losses by step."""

    steps: int
    held_out: dict[int, float]


def _no_reports(done: int) -> Iterable[Report]:
    del done
    return ()


def fine_tune(
    model: RoundPipe,
    batches: Batches,
    settings: Settings,
    *,
    evaluation: Evaluation | None = None,
    kept: Kept | None = None,
    reports: Callable[[int], Iterable[Report]] = _no_reports,
    processes: Processes = ALONE,
) -> TrainingOutcome:
    """Train a wrapped model whose loss is its own, as ``labels`` in a batch ask for.

    Args:
        evaluation: held-out data, evaluated before the first step, as the settings say, and after the last.
        kept: `InFolder` for checkpoints, metrics and the model in a folder; by default nothing is kept.
        reports: opens more reports, given the number of steps that are done already.
        processes: those that train together; by default only this one.

    A run in a folder that is finished is not trained again. Ctrl-C and SIGTERM end it after the step under
    way, with a checkpoint. Raises, before anything is trained or overwritten, `Refused` for what cannot be
    used and `HostMemoryShort` if it does not fit; later `Diverged` if loss or gradients are not finite,
    `Unwritable` if a result cannot be written, and `Interrupted`. With several processes, the others raise
    `ToldElsewhere` for errors that all raise.
    """
    kept = kept or KeepsNothing()
    training = Training(model, batches, settings, evaluation, processes)
    training.check_host()
    processes.lead(lambda: _make_trace(settings))
    # Layers draw from this generator; a checkpoint has its state.
    torch.manual_seed(settings.seed)  # pyright: ignore[reportUnknownMemberType]
    if processes.lead(lambda: kept.is_finished(settings)):
        _LOG.info("the run is finished; nothing is left to do")
        return TrainingOutcome(settings.steps, {})
    done = kept.begin(training)
    if done > settings.steps:
        raise Refused(f"{settings.names.resume}: {done} steps are done already, but steps is {settings.steps}")
    opened = processes.all(lambda: Reports(*kept.reports(done or None), *reports(done)))
    with opened, Interruption(processes.most) as interruption:
        loop = _Loop(training, kept, opened, interruption)
        return loop.run(done)


def _make_trace(settings: Settings) -> None:
    if settings.profile is not None:
        create_profile(settings.profile, settings.names)


class _Loop:
    def __init__(self, training: Training, kept: Kept, reports: Reports, interruption: Interruption) -> None:
        self._training, self._kept, self._reports = training, kept, reports
        self._interruption, self._settings = interruption, training.settings
        self._held_out: dict[int, float] = {}

    def run(self, done: int) -> TrainingOutcome:
        """Train the remaining steps, and finish; reports end where the results are."""
        try:
            return self._finished(done)
        finally:
            self._follow()

    def _finished(self, done: int) -> TrainingOutcome:
        steps = self._settings.steps
        if self._training.owes_evaluation:
            loss = self._evaluate(done)
            if 0 < done < steps:
                self._kept.save_if_due(done, loss, is_saved=True)
        begun = done
        done, unwritten = self._profiled(done)
        if begun < done == steps:
            self._evaluate(done)
        if self._is_over(done):
            self._tell_of_the_end(done)
        self._follow()
        if self._interruption.is_asked():
            raise Interrupted(self._stopped(done), self._interruption.number) from unwritten
        unwritten = self._kept.finish(done) or unwritten
        if unwritten is not None:
            raise unwritten
        return TrainingOutcome(done, self._held_out)

    def _stopped(self, done: int) -> str:
        begin = f"interrupted after step {done} of {self._settings.steps}"
        try:
            kept = self._kept.stop(done)
        except Unwritable as error:
            raise Unwritable(f"{begin}, but {error}") from error
        return f"{begin}; {kept}" if done else f"interrupted before the first step; {kept}"

    def _profiled(self, done: int) -> tuple[int, Unwritable | None]:
        """Train the remaining steps; return how many are done, and an error if the trace was not written."""
        path = self._settings.profile
        if path is None:
            return self._steps(done), None
        reached: int | None = None
        try:
            with writing(f"{self._settings.names.profile} {path}"), profile(path) as taken:
                reached = self._steps(done)
        except Unwritable as error:
            if reached is None:
                raise
            return reached, error
        _LOG.info("%s\nthe trace is in %s", taken.summary, path)
        return reached, None

    def _steps(self, done: int) -> int:
        """Train the remaining steps; return the number of steps done, fewer than all after a signal."""
        steps = self._settings.steps
        with ShortCollections() as collections:
            for step in range(done + 1, steps + 1):
                if self._interruption.is_asked() or self._is_over(step - 1):
                    return step - 1
                self._step(step)
                loss = self._evaluate(step) if self._is_due(step) else None
                if step < steps and not self._training.owes_evaluation:
                    self._kept.save_if_due(step, loss)
                if self._is_over(step):
                    return step
                collections.note_step()
        return steps

    def _step(self, step: int) -> None:
        figures, is_finite = self._training.step(step)
        self._follow()
        self._reports.step(figures)
        if not is_finite and not self._training.has_labels(step):
            raise Refused(f"no label of step {step} counts, so it has no loss; leave such batches out")
        if not is_finite:
            raise self._diverged(f"the loss must stay finite, but is {figures.loss} at step {step}", step - 1)

    def _follow(self) -> None:
        if (folder := self._kept.moved()) is not None:
            self._reports.follow(folder)

    def _is_over(self, step: int) -> bool:
        """Return whether the training ends early, since the held-out loss does not fall any more."""
        return step < self._settings.steps and self._training.patience.is_over

    def _tell_of_the_end(self, done: int) -> None:
        patience = self._training.patience
        assert patience.lowest is not None
        step, loss = patience.lowest
        _LOG.info(
            "ends early, after step %d of %d: in %d evaluations the held-out loss has not fallen by more than %g; "
            "the lowest, %.4f, was after step %d, which %s",
            done,
            self._settings.steps,
            patience.count,
            self._settings.early_stopping_threshold,
            loss,
            step,
            self._kept.best(step),
        )

    def _is_due(self, step: int) -> bool:
        every = self._settings.eval_every
        return step < self._settings.steps and every is not None and step % every == 0

    def _evaluate(self, step: int) -> float | None:
        """Return the held-out loss; None if nothing is evaluated, or after a signal, which ends it early."""
        loss = self._training.held_out_loss(self._interruption, self._reports.evaluating)
        if loss is not None:
            self._held_out[step] = loss
            self._training.patience.note(step, loss)
            self._reports.held_out(step, loss)
            _LOG.info("held-out loss after step %d: %.4f", step, loss)
            if not math.isfinite(loss):
                problem = f"the held-out loss must stay finite, but is {loss} after step {step}"
                raise self._diverged(problem, step)
        return loss

    def _diverged(self, problem: str, updates: int) -> Exception:
        """Return the error for a loss that is not finite; before the first update, weights may be the reason."""
        names = self._settings.names
        spoilt = None if updates else spoilt_weight(self._training.model, names.model)
        return Diverged(f"{problem}; try a lower {names.lr}") if spoilt is None else Refused(spoilt)
