"""The steps of a fine-tuning, its evaluations and its checkpoints."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roundpipe import CheckpointManager, RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe.cli.crew import ALONE, Crew
from roundpipe.cli.errors import Refused
from roundpipe.cli.finetune.data.batches import Sequences, Steps, labels_in
from roundpipe.cli.finetune.data.tokens import IGNORED
from roundpipe.cli.finetune.options import FineTuning
from roundpipe.cli.finetune.updates import Updates
from roundpipe.cli.interrupt import Interruption
from roundpipe.cli.report import StepFigures, figures_of
from roundpipe.errors import CheckpointError

# The argument by which transformers' models divide the sum over labels, if it is given.
TOTAL = "num_items_in_batch"


class Job:
    """Trains a wrapped model. `evaluation`: the held-out data, if any. `manager`: manages its checkpoints."""

    def __init__(
        self,
        options: FineTuning,
        model: RoundPipe,
        updates: Updates,
        data: Steps,
        evaluation: Evaluation | None,
        manager: CheckpointManager,
        runtime: Runtime,
        crew: Crew = ALONE,
    ) -> None:
        self.crew = crew
        self.options, self.model, self.updates, self.data = options, model, updates, data
        self.evaluation, self.manager, self.runtime = evaluation, manager, runtime
        self._saved_step: int | None = None
        self._lowest: float | None = None
        # Whether an evaluation is due: before the first step, or after a signal has ended one.
        self.owes_evaluation = True
        self._saved_at = time.monotonic()
        if options.accumulation > 1:
            _check_accumulation(model, data.calls(1)[0])

    def step(self, step: int) -> tuple[StepFigures, bool]:
        """Run step number `step`, counted from 1; return its figures and whether its loss is finite.

        If it is not, there is no update. Unless `sync`, the update may end after the return. Raises `Diverged` for
        gradients that are not finite, of this step or, unless `sync`, of the previous one. With `step_in_backward`
        the update is part of the call, even if the loss is not finite.
        """
        began = time.perf_counter()
        rate = self.updates.rate(step)
        during = self.updates.optimizer if self.options.step_in_backward else None
        if during is not None:
            self.updates.set_rate(rate)
        loss = self._backpropagate(self.data.calls(step), during)
        late = self.model.weights_delay
        is_finite = bool(torch.isfinite(torch.tensor(loss)))
        if is_finite and during is None:
            self.model.step(partial(self.updates.update, step, rate), is_async=not self.options.sync)
        seconds = time.perf_counter() - began
        tokens = self.data.tokens(step)
        figures = figures_of(
            self.runtime, step=step, loss=loss, late=late, tokens=tokens, rate=rate, seconds=seconds
        )
        return figures, is_finite

    def _backpropagate(self, calls: list[dict[str, Tensor]], during: torch.optim.Optimizer | None) -> float:
        """Run the calls; return the mean loss over the labels of all, with calls weighted by their labels."""
        total = sum(map(labels_in, calls))
        whole: dict[str, Any] = {TOTAL: total} if len(calls) > 1 else {}
        losses = [self.model.forward_backward(input_kwargs={**call, **whole}, optimizer=during) for call in calls]
        return sum(loss.item() for loss in losses)

    def held_out_loss(self, interruption: Interruption) -> float | None:
        """Return the mean loss over all held-out labels, after all updates; None if nothing is evaluated.

        It does not change the random numbers that training draws afterwards. A signal ends it after the current
        call; the result is then None, and checkpoints record that it is still due.
        """
        self.owes_evaluation = self.evaluation is not None
        if self.evaluation is None:
            return None
        self.model.synchronize()
        self.model.eval()
        try:
            # A call draws a seed from the CPU generator, on all devices.
            with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
                loss = self.evaluation.loss(self.model, interruption, self.crew.size)
        finally:
            self.model.train()
        self.owes_evaluation = loss is None
        return loss

    def save_if_due(self, step: int, loss: float | None, *, is_saved: bool = False) -> None:
        """Save a checkpoint if the number of steps or minutes says so, or for the lowest held-out loss so far.

        `is_saved`: the step has a checkpoint, but without a loss.
        """
        options = self.options
        is_best = loss is not None and (self._lowest is None or loss < self._lowest)
        self._lowest = loss if is_best else self._lowest
        if is_saved and not is_best:
            return
        by_step = options.save_every is not None and step % options.save_every == 0
        if is_best or by_step or self._is_time():
            self._save(step, loss)

    def _is_time(self) -> bool:
        """Return whether a checkpoint is due by the first machine's clock."""
        wanted = self.options.save_minutes
        return wanted is not None and self.crew.lead(lambda: (time.monotonic() - self._saved_at) / 60 >= wanted)

    def save_now(self, step: int) -> None:
        """Save a checkpoint, unless this step has one, and wait until it is on the disk.

        Raises `CheckpointError` if it cannot be written.
        """
        if self._saved_step != step:
            self._save(step, None)
        self.manager.wait()

    def _save(self, step: int, loss: float | None) -> None:
        self._saved_step, self._saved_at = step, time.monotonic()
        count = self.model.model_run_config.num_microbatch
        data = {"num_microbatch": count, "lowest_loss": self._lowest, "owes_evaluation": self.owes_evaluation}
        self.manager.save(self.model, self.updates.optimizer, step=step, data=data, metric=loss)

    def resume(self) -> int:
        """Load the newest intact checkpoint; return its step, 0 if there is none.

        Raises `Refused` if none can be loaded.
        """
        try:
            loaded = self.manager.load_latest(self.model, self.updates.optimizer)
        except CheckpointError as error:
            raise Refused(f"--resume: {error}") from error
        if loaded is None:
            return 0
        self._saved_step, self._lowest = loaded.step, loaded.data["lowest_loss"]
        self.owes_evaluation = loaded.data.get("owes_evaluation", False)
        return loaded.step


class Evaluation:
    """Held-out data. `batch`: sequences in a call.

    It runs training calls and drops their gradients, since a batch's logits would fill the host's memory.
    """

    def __init__(self, sequences: Sequences, batch: int, pad: int) -> None:
        rows = [sequences.at(number) for number in range(sequences.in_epoch)]
        self._batches = [sequences.of(rows[at : at + batch], pad) for at in range(0, len(rows), batch)]

    def loss(self, model: RoundPipe, interruption: Interruption, machines: int = 1) -> float | None:
        """Return the mean loss over all labels, None after a signal. Needs and leaves a model without gradients.

        `machines`: how many share each call.
        """
        counts = list(map(labels_in, self._batches))
        count = model.model_run_config.num_microbatch
        assert isinstance(count, int)
        losses: list[float] = []
        for batch in (_for_each(batch, machines) for batch in self._batches):
            if interruption.is_asked():
                return None
            # The last batch may have fewer sequences.
            parts = min(count, len(batch["input_ids"]))
            config = RoundPipeRunConfig(num_microbatch=parts)
            losses.append(model.forward_backward(input_kwargs=batch, run_config=config).item())
            model.zero_grad()
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def _for_each(batch: dict[str, Tensor], machines: int) -> dict[str, Tensor]:
    """Return a batch with at least one row per machine, padded by its last row without labels.

    >>> batch = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[3, 4]])}
    >>> _for_each(batch, 2)["labels"].tolist()
    [[3, 4], [-100, -100]]
    """
    rows = len(batch["input_ids"])
    if rows >= machines:
        return batch
    padded = {name: torch.cat([value, *[value[-1:]] * (machines - rows)]) for name, value in batch.items()}
    padded["labels"][rows:] = IGNORED
    return padded


def _check_accumulation(model: RoundPipe, batch: dict[str, Tensor]) -> None:
    """Raise `Refused` unless the model's loss can be divided by the labels of several calls."""
    own: Any = getattr(model.model, "own_loss", None)
    if TOTAL not in own.with_total(batch):
        raise Refused(
            f"--accumulation must be 1: the loss of a {type(model.named_model).__name__} is a mean over one call; "
            "raise --batch and --num-microbatch instead, which is the same sum"
        )
