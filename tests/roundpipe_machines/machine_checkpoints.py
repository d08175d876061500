"""A training that is saved on some machines and goes on on others."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from machine_trainings import Apart, Found, adamw, batch, row, square_error, weights, wrapped
from roundpipe import (
    CheckpointManager,
    GradScaler,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    load_checkpoint,
    save_checkpoint,
    wrap_model_to_roundpipe,
)
from rp_checkpoint.errors import CheckpointWarning
from rp_checkpoint.files.writer import FileWriter
from torch import nn

SAVED = 3


class Training:
    """A model with dropout, its optimizer with a schedule, and a scaler."""

    def __init__(self, runtime: Runtime, *, is_async: bool, double_buffer: bool, bits: int) -> None:
        self.layers = row(dropout=0.2)
        # Other weights than those that were saved, which are loaded.
        with torch.no_grad():
            self.layers[0].weight.add_(0.0)
        if bits == 16:
            self.layers.bfloat16()
        self.model: RoundPipe = wrapped(
            runtime, self.layers, double_buffer=double_buffer, optim_dtype=torch.float32
        )
        self.optimizer = adamw(self.model.optim_parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = GradScaler(init_scale=8.0, growth_interval=2, runtime=runtime)
        self.is_async = is_async
        self.losses: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        """One call and step."""
        x, y = (value.to(self.layers[0].weight.dtype) for value in batch(number))

        def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.scaler.scale(square_error(outputs, labels).float())

        self.losses.append(self.model.forward_backward((x,), label=y, loss_fn=loss_fn))
        self.model.step(
            lambda: (self.scaler.step(self.optimizer), self.schedule.step(), self.optimizer.zero_grad()),
            is_async=self.is_async,
        )
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        """What is saved and loaded beside the model."""
        return {"optimizer": self.optimizer, "scaler": self.scaler, "schedulers": self.schedule}


def trained(
    runtime: Runtime, *, folder: str, steps: int, is_async: bool, double_buffer: bool, bits: int = 32
) -> Found:
    """Go on from the newest checkpoint if there is one, save one after step `SAVED`, and end after `steps`."""
    training = Training(runtime, is_async=is_async, double_buffer=double_buffer, bits=bits)
    manager = CheckpointManager(folder, keep_last=2)
    loaded = manager.load_latest(training.model, **training.state())
    first = 0 if loaded is None else loaded.step
    for number in range(first, steps):
        training.step(number)
        if number + 1 == SAVED:
            manager.save(training.model, step=SAVED, data={"at": number}, **training.state())
    manager.wait()
    training.model.synchronize()
    return {
        "first": first,
        "losses": training.losses,
        "weights": weights(training.layers),
        "scale": training.scaler.get_scale(),
        "state bytes": sum(
            value.nbytes
            for state in training.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and not value.is_meta
        ),
    }


def trained_apart(runtime: Runtime, *, folder: str, steps: int, is_async: bool, double_buffer: bool) -> Found:
    """`trained` for a model that is no row, two calls a step, dropout: it has a weight outside of its parts."""
    torch.manual_seed(0)
    net = Apart()
    config = RoundPipeRunConfig(num_microbatch=5)
    model: Any = wrap_model_to_roundpipe(
        net,
        runtime=runtime,
        name="apart",
        lower_threshold=0,
        model_run_config=config,
        double_buffer=double_buffer,
    )
    optimizer = adamw(model.optim_parameters())
    manager = CheckpointManager(folder, keep_last=2)
    loaded = manager.load_latest(model, optimizer)
    first = 0 if loaded is None else loaded.step
    losses: list[torch.Tensor] = []
    for number in range(2 * first, 2 * steps):
        x, y = batch(number)
        outputs = model(x)
        loss = square_error(outputs["out"], y) + outputs["h"].abs().mean()
        loss.backward()
        losses.append(loss.detach())
        if number % 2:
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        if number + 1 == 2 * SAVED:
            manager.save(model, optimizer, step=SAVED)
    manager.wait()
    model.synchronize()
    return {"first": first, "losses": losses, "weights": weights(net)}


def unwritten(runtime: Runtime, *, folder: str) -> list[Any]:
    """A checkpoint whose files machine 1 cannot write: what is said when the next one is saved."""
    training = Training(runtime, is_async=False, double_buffer=False, bits=32)
    manager = CheckpointManager(folder)
    finish = FileWriter.finish

    def full(writer: FileWriter) -> Any:
        finish(writer)
        raise OSError(errno.ENOSPC, "No space left on device")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            training.step(number)
            if not number and runtime.group is not None and runtime.group.rank:
                FileWriter.finish = full
            manager.save(training.model, step=number, **training.state())
            with contextlib.suppress(Exception):
                saving = manager._saving
                assert saving is not None
                saving.wait()
            FileWriter.finish = finish
    manager.wait()
    told = [str(one.message) for one in caught if issubclass(one.category, CheckpointWarning)]
    return [told, [path.name for path in manager.checkpoints()]]


def refused(runtime: Runtime, *, folder: str) -> list[str]:
    """A parameter group of a stranger; then a folder that machine 1 does not see."""
    training = Training(runtime, is_async=False, double_buffer=False, bits=32)
    training.step(0)
    strange = adamw(
        [nn.Parameter(torch.ones(2))]
        if runtime.group is not None and runtime.group.rank
        else [*training.model.optim_parameters()]
    )
    manager = CheckpointManager(folder)
    try:
        manager.save(training.model, strange, step=1, wait=True)
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    # Training, and saving, go on.
    training.step(1)
    saved = manager.save(training.model, step=2, wait=True, **training.state())
    return [said, saved.path.name, str(math.isfinite(float(training.losses[-1])))]


def mistaken(runtime: Runtime, *, folder: str) -> list[str]:
    """A folder that is taken, other checkpoints on other machines, and one that machine 1 cannot read."""
    training = Training(runtime, is_async=False, double_buffer=False, bits=32)
    rank = 0 if runtime.group is None else runtime.group.rank
    paths: list[Path] = []
    for number in range(2):
        training.step(number)
        paths.append(save_checkpoint(f"{folder}/{number}", training.model, **training.state()).path)
    damaged = Path(folder) / "damaged"
    if rank == 1:
        shutil.copytree(paths[0], damaged)
        (damaged / "model-00001-of-00002.safetensors").write_bytes(b"nothing")
    found: list[str] = []
    for attempt in (
        lambda: save_checkpoint(paths[0], training.model, **training.state()),
        lambda: load_checkpoint(paths[rank], training.model, **training.state()),
        lambda: load_checkpoint(paths[0] if rank == 0 else damaged, training.model, **training.state()),
    ):
        try:
            attempt()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    load_checkpoint(paths[0], training.model, **training.state())
    training.step(1)
    save_checkpoint(f"{folder}/last", training.model, **training.state())
    return [*found, str(float(training.losses[1])), str(float(training.losses[2]))]
