"""`save_checkpoint`: write the whole state of a training while the training continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from rp_checkpoint.model.saveable import Saveable, check_saveable
from rp_checkpoint.saving.saving import SavingCheckpoint
from rp_checkpoint.training import TrainingObjects

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Schedulers = Any


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Saveable,
    optimizer: Optimizers = None,
    *,
    step: int = 0,
    scaler: Any = None,
    schedulers: Schedulers = (),
    data: Any = None,
    metric: float | torch.Tensor | None = None,
    wait: bool = True,
    buffer_bytes: int = 1 << 30,
    shard_bytes: int = 4 << 30,
) -> SavingCheckpoint:
    """Write a folder from which training continues exactly; it is either complete or absent.

    Args:
        path: the folder, which must not exist or must be empty.
        model: a wrapped model.
        optimizer: the optimizer of `model.optim_parameters()`, or several; this library's, or torch's.
        step: the number of steps taken; `load_checkpoint` returns it.
        scaler: a `GradScaler`, or torch's.
        schedulers: learning-rate schedulers; one, or several.
        data: the position in the data, such as an epoch and an index: numbers, text, lists, dicts and tensors.
        metric: a number, or a tensor of one, by which a `CheckpointManager` finds the best.
        wait: whether to wait until the folder is complete. Otherwise this returns as soon as all steps so far have
            ended, and the folder is written while training continues; `SavingCheckpoint.wait` raises its error.
        buffer_bytes: the most host memory for writing, beside that of training; at least 64 MiB, and otherwise at
            most half of the free memory.
        shard_bytes: the largest size of a file; a larger tensor is alone in its file.

    The checkpoint has the model as the steps launched so far leave it: weights, masters, states of optimizer,
    scaler and schedulers, the random number generators of the process, and the plans of the calls. After an
    asynchronous step it also has the weights that calls read, which are those of the previous step. Gradients are
    not saved: save after a step. The weights are in the layout of `save_pretrained`, so that
    ``from_pretrained(path)`` loads them; for an adapted model (PEFT) these are the adapters, and the base model is
    not saved.

    Calls and steps may continue immediately, on any thread. The next step waits until all tensors are in the
    buffer or on the disk, since it overwrites them; `SavingCheckpoint.waited_s` and the log have the time that
    this took.

    >>> from tempfile import TemporaryDirectory
    >>> from roundpipe import RoundPipe, Runtime
    >>> with Runtime("cpu:1") as runtime, TemporaryDirectory() as folder:
    ...     model = RoundPipe(torch.nn.Linear(4, 4), runtime=runtime)
    ...     optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    ...     saved = save_checkpoint(f"{folder}/step-5", model, optimizer, step=5, data={"epoch": 1})
    ...     sorted(path.name for path in saved.path.iterdir())
    ['model.safetensors', 'roundpipe']

    Raises `CheckpointError` if the folder cannot be written (a full disk, a read-only folder): training can
    continue, and no other checkpoint is touched. Raises it, whether it waits or not, for an optimizer of other
    parameters and for `data` that a checkpoint cannot hold. Raises `ValueError` or `TypeError` for invalid
    arguments, `StepFailed` after a failed step, and errors of earlier calls and steps that were not raised yet.
    Warns with `CheckpointWarning` if there are gradients.
    """
    given: dict[str, Any] = {"scaler": scaler, "schedulers": schedulers, "data": data, "metric": metric}
    sizes = {"buffer_bytes": buffer_bytes, "shard_bytes": shard_bytes}
    saving, begin = prepared(path, model, optimizer, step=step, **given, **sizes)
    begin()
    if wait:
        saving.wait()
    return saving


def prepared(
    path: str | os.PathLike[str],
    model: Saveable,
    optimizer: Optimizers = None,
    *,
    step: int = 0,
    scaler: Any = None,
    schedulers: Schedulers = (),
    data: Any = None,
    metric: float | torch.Tensor | None = None,
    buffer_bytes: int = 1 << 30,
    shard_bytes: int = 4 << 30,
) -> tuple[SavingCheckpoint, Callable[[], None]]:
    """Return a checkpoint and what begins it, so that it is known before Ctrl-C can come between.

    The arguments are those of `save_checkpoint`. Raises as it does for invalid ones.
    """
    target = _checked(path, model, step, buffer_bytes, shard_bytes)
    number = None if metric is None else _number(metric)
    facts = {"step": step, "data": data, "metric": number, "model": model.checkpoint_facts().encoded()}
    training = replace(TrainingObjects.checked(optimizer, scaler, schedulers), facts=facts)
    saving = SavingCheckpoint(target, step)
    return saving, partial(saving.begin, model, training, buffer_bytes, shard_bytes)


def _number(metric: object) -> float:
    try:
        return float(cast("float", metric))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"metric must be a number, but is {metric!r}") from error


def _checked(path: Any, model: object, step: object, buffer_bytes: object, shard_bytes: object) -> Path:
    check_saveable(model)
    for name, value, least in (
        ("step", step, 0),
        ("buffer_bytes", buffer_bytes, 1),
        ("shard_bytes", shard_bytes, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, but is {value!r}")
    return Path(os.path.abspath(path))
