"""A training job: steps, evaluation and saving of one model on one runtime."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rp_presets import causal_lm_loss
from torch import Tensor

from roundpipe import RoundPipeRunConfig, Runtime, optim, wrap_model_to_roundpipe
from roundpipe.cli.options import Options
from roundpipe.cli.output import finished_files, writing
from roundpipe.cli.report import StepFigures, figures_of
from roundpipe.cli.training import data
from roundpipe.cli.training.model import ModelSize, make_model, save_model
from roundpipe.cli.training.rates import learning_rate
from roundpipe.cli.training.windows import Windows

HELD_OUT_BYTES = 64 * 1024

# Low momentum suits both synchronous and late steps here: docs/staleness.md.
BETAS = (0.5, 0.95)
WEIGHT_DECAY = 0.1

# Small gradients underflow in float16, so the loss is scaled up before backward and the gradients down after it.
LOSS_SCALES = {"float32": 1.0, "bfloat16": 1.0, "float16": 1024.0}


class Job:
    """Trains a model on windows of text that the seed chooses.

    `options` must have their devices and dtype filled in.
    """

    def __init__(self, options: Options, corpus: data.Corpus, size: ModelSize, runtime: Runtime) -> None:
        self.options = options
        self.runtime = runtime
        self.scale = LOSS_SCALES[str(options.dtype)]
        self.training = Windows(corpus.training, options.seq_len)
        self.held_out = Windows(corpus.held_out, options.seq_len)
        self.source = make_model(size, dtype=_dtype(options.dtype), seed=options.seed, seq_len=options.seq_len)
        self.model = wrap_model_to_roundpipe(
            self.source,
            optim_dtype=_dtype(options.optim_dtype),
            master=cast("Any", options.master),  # Any: one of two, as the options have checked
            step_in_backward=options.step_in_backward,
            model_run_config=RoundPipeRunConfig(num_microbatch=options.num_microbatch),
            runtime=runtime,
        )
        self.optimizer = optim.AdamW(
            self.model.optim_parameters(),
            lr=options.lr,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            state=cast("Any", options.optimizer_state),  # Any: one of three, as the options have checked
        )

    def step(self, step: int) -> StepFigures:
        """Run training step number `step`, counted from 1; unless `sync`, its update may end after the return."""
        began = time.perf_counter()
        rate = learning_rate(step, steps=self.options.steps, highest=self.options.lr)
        inputs, labels = self.training.at(self._starts(step))
        during = self.optimizer if self.options.step_in_backward else None
        if during is not None:
            self._set_rate(rate)
        loss = self.model.forward_backward(
            input_kwargs={"input_ids": inputs}, label=labels, loss_fn=self._loss, optimizer=during
        )
        late = self.model.weights_delay
        if during is None:
            self.model.step(partial(self._update, rate), is_async=not self.options.sync)
        return self._figures(step, loss.item() / self.scale, late, rate, time.perf_counter() - began)

    def held_out_loss(self) -> float:
        """Compute the loss on the held-out windows, in nats per byte, after waiting for all updates."""
        self.model.synchronize()
        self.model.eval()
        with torch.no_grad():
            losses = [self._summed_loss(starts) for starts in self._held_out_batches()]
        self.model.train()
        return sum(losses) / (len(losses) * self.options.batch_tokens)

    def save(self, folder: Path) -> None:
        """Write the model; if a write fails, raise `Unwritable` and remove the parts.

        Call it after `synchronize`, which all machines call.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with writing(f"--output {folder}: the model"), finished_files(folder) as unfinished:
            save_model(self.source, unfinished)

    def _starts(self, step: int) -> list[int]:
        options = self.options
        return data.training_starts(
            len(self.training),
            seed=options.seed,
            step=step,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
        )

    def _held_out_batches(self) -> list[list[int]]:
        size = self.options.batch_size
        wanted = min(HELD_OUT_BYTES, len(self.held_out))
        batches = max(1, wanted // self.options.batch_tokens)
        starts = data.held_out_starts(len(self.held_out), count=batches * size, seq_len=self.options.seq_len)
        return [starts[first : first + size] for first in range(0, len(starts), size)]

    def _summed_loss(self, starts: list[int]) -> float:
        inputs, labels = self.held_out.at(starts)
        outputs: Any = self.model(input_ids=inputs)  # Any: the output object of the Hugging Face model
        return causal_lm_loss(outputs, labels, reduction="sum", aligned=True).item()

    def _loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """Compute a microbatch's share of the mean over the batch: the engine sums losses over microbatches."""
        total = causal_lm_loss(outputs, labels, reduction="sum", aligned=True)
        return total * (self.scale / self.options.batch_tokens)

    def _update(self, rate: float) -> None:
        """Apply the gradients at this learning rate; runs on the optimizer's thread."""
        self._set_rate(rate)
        if self.scale == 1 or self._unscale():
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] - torch leaves the closure untyped
        self.optimizer.zero_grad()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _unscale(self) -> bool:
        """Divide the gradients by the loss scale; return whether all of them are finite."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        grads: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for grad in grads:
            grad.div_(self.scale)
        return all(bool(grad.isfinite().all()) for grad in grads)

    def _figures(self, step: int, loss: float, late: int, rate: float, seconds: float) -> StepFigures:
        return figures_of(
            self.runtime,
            step=step,
            loss=loss,
            late=late,
            tokens=self.options.batch_tokens,
            rate=rate,
            seconds=seconds,
        )


def _dtype(name: str | None) -> torch.dtype:
    return getattr(torch, str(name))
