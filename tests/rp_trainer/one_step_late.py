"""A plain `Trainer` whose calls read weights that are one step older: what asynchronous steps are to equal."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback


class _NoteWeights(TrainerCallback):
    def __init__(self, trainer: LateTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.late = self._trainer.current()


class LateTrainer(Trainer):
    """`late`: the weights that the next call reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.late = self.current()
        self.add_callback(_NoteWeights(self))

    def current(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]

    def _set(self, values: list[torch.Tensor]) -> None:
        for one, value in zip(self.model.parameters(), values, strict=True):
            one.data.copy_(value)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        now = self.current()
        self._set(self.late)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._set(now)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation publishes the last step's result, which the next call then reads.
        self.late = self.current()
        return super().evaluate(*args, **kwargs)
