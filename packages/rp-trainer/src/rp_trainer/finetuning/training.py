"""`Training`: the steps of a fine-tuning, and its evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from roundpipe import OwnLoss, RoundPipe

from rp_trainer.errors import Refused
from rp_trainer.finetuning.batches import Batches, Call, labels_in
from rp_trainer.finetuning.evaluation import Evaluation, Patience
from rp_trainer.finetuning.reports import StepFigures, memory_figures
from rp_trainer.finetuning.settings import Settings
from rp_trainer.finetuning.updates import launch, set_rate, stepped
from rp_trainer.processes import ALONE, Processes
from rp_trainer.stopping import Interruption

# The argument by which transformers' models divide the sum over labels, if it is given.
TOTAL = "num_items_in_batch"


class Training:
    """Trains a wrapped model step by step. `evaluation`: the held-out data, if any.

    Raises `Refused` for several calls a step, if the model's loss cannot be divided by the labels of all.
    """

    def __init__(
        self,
        model: RoundPipe,
        batches: Batches,
        settings: Settings,
        evaluation: Evaluation | None = None,
        processes: Processes = ALONE,
    ) -> None:
        if not hasattr(model, "named_model"):
            raise Refused(
                f"the model must be wrapped, see wrap_model_to_roundpipe, but is a {type(model).__name__}"
            )
        if settings.step_in_backward and batches.accumulation > 1:
            raise Refused(f"{settings.names.accumulation} must be 1 with step_in_backward: each call is a step")
        self.model, self.settings, self.processes = model, settings, processes
        self._batches, self._evaluation = batches, evaluation
        self.patience = Patience(settings.early_stopping, settings.early_stopping_threshold)
        # The tokens up to the end of a step.
        self._seen = (0, 0)
        self.optimizer = stepped(model, settings)
        # Whether an evaluation is due: before the first step, or after a signal has ended one.
        self.owes_evaluation = True
        if batches.accumulation > 1:
            _check_accumulation(model, batches.calls(1)[0], settings)

    def check_host(self) -> None:
        """Raise `HostMemoryShort` unless training fits beside what is in memory now."""
        self.model.memory_forecast(self.optimizer.exposed(), additions=self._batches.accumulation).check()

    def step(self, step: int) -> tuple[StepFigures, bool]:
        """Run step number `step`, counted from 1; return its figures and whether its loss is finite.

        If it is not, there is no update. Unless `sync`, the update may end after the return. Raises `Diverged` for
        gradients that are not finite, of this step or, unless `sync`, of the previous one. With `step_in_backward`
        the update is part of the call, even if the loss is not finite.
        """
        began = time.perf_counter()
        rate = self.settings.rate(step)
        set_rate(self.optimizer, rate)
        during = self.optimizer.in_call() if self.settings.step_in_backward else None
        loss = self._backpropagate(self._batches.calls(step), during)
        late = self.model.weights_delay
        is_finite = math.isfinite(loss)
        norm = launch(self.optimizer, self.settings, step) if is_finite else None
        seconds = time.perf_counter() - began
        tokens, seen = self._tokens(step)
        figures = StepFigures(
            step=step,
            loss=loss,
            tokens=seen,
            epoch=self._batches.epoch(step),
            steps_late=late,
            tokens_per_s=tokens / seconds,
            learning_rate=rate,
            grad_norm=norm,
            seconds=seconds,
            **memory_figures(self.model.runtime),
        )
        return figures, is_finite

    def _tokens(self, step: int) -> tuple[int, int]:
        """Return the number of tokens of a step, and of all steps up to it."""
        last, seen = self._seen
        # Those of an earlier process are counted once, when a run goes on.
        counts = [self._batches.tokens(number) for number in range(last + 1, step + 1)]
        self._seen = step, seen + sum(counts)
        return counts[-1], self._seen[1]

    def _backpropagate(self, calls: Sequence[Call], during: torch.optim.Optimizer | None) -> float:
        """Run the calls; return the mean loss over the labels of all, with calls weighted by their labels.

        What a model adds to that, such as a router's loss, is a mean over the rows of all.
        """
        if len(calls) == 1:
            return self.model.forward_backward(input_kwargs=calls[0], optimizer=during).item()
        own: Any = self.model.model.own_loss
        total = sum(own.with_total(call)[TOTAL] for call in calls)
        whole = [{**call, TOTAL: total} for call in calls]
        # One's own class of loss need not know of extra terms.
        over = own.over(whole) if hasattr(own, "over") else own
        losses = [self.model.forward_backward(input_kwargs=call, loss_fn=over, optimizer=during) for call in whole]
        return sum(loss.item() for loss in losses)

    def has_labels(self, step: int) -> bool:
        """Return whether any label of a step counts; the mean over none is not a number."""
        return any(labels_in(call, self.model) for call in self._batches.calls(step))

    def held_out_loss(self, interruption: Interruption, told: Callable[[int, int], None]) -> float | None:
        """Return the mean loss over all held-out labels, after all updates; None if nothing is evaluated.

        It does not change the random numbers that training draws afterwards. A signal ends it after the current
        call; the result is then None, and checkpoints record that it is still due. `told`: is called before each
        batch with how many are done, of how many.
        """
        self.owes_evaluation = self._evaluation is not None
        if self._evaluation is None:
            return None
        self.model.synchronize()
        self.model.eval()
        try:
            # Calls draw no seed in evaluation mode, but a layer may draw all the same.
            with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
                loss = self._evaluation.loss(self.model, interruption, self.processes.size, told)
        finally:
            self.model.train()
        self.owes_evaluation = loss is None
        return loss


def _check_accumulation(model: RoundPipe, batch: Call, settings: Settings) -> None:
    """Raise `Refused` unless the model's loss can be divided by the labels of several calls."""
    own: Any = getattr(model.model, "own_loss", None)
    if not isinstance(own, OwnLoss) or TOTAL not in own.with_total(batch):
        names = settings.names
        raise Refused(
            f"{names.accumulation} must be 1: the loss of a {type(model.named_model).__name__} is a mean over one "
            f"call; raise {names.batch} and {names.num_microbatch} instead, which is the same sum"
        )


def spoilt_weight(model: RoundPipe, called: str) -> str | None:
    """Return an error message with the first weight that is not finite; None if all are. `called`: the model."""
    for name, weight in model.named_model.named_parameters():
        if not bool(weight.detach().isfinite().all()):
            return f"{called}: its weight {name} has numbers that are NaN or infinite; fetch it or save it again"
    return None
