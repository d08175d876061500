"""`save_checkpoint`: write the whole state of a training while the training continues."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rp_dist import DistError
from rp_optim.jobs import Outcome, Worker

from roundpipe.checkpoints.disk import new_folder_for, put_in_place, sync_tree, write_durably
from roundpipe.checkpoints.layout import Layout, layout_of
from roundpipe.checkpoints.manifest import OWN, Checksum, seal
from roundpipe.checkpoints.snapshot import Snapshot, Training
from roundpipe.checkpoints.writer import Writer
from roundpipe.engine.capture import Captured
from roundpipe.errors import CheckpointError, CheckpointWarning, RoundPipeError, in_words
from roundpipe.models.base import RoundPipeBase, wrappers
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.runtime.together import Together

_LOG = logging.getLogger(__name__)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Schedulers = Any


def save_checkpoint(
    path: str | os.PathLike[str],
    model: RoundPipeBase,
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
    target = _checked(path, model, step, buffer_bytes, shard_bytes)
    number = None if metric is None else _number(metric)
    facts = {"step": step, "data": data, "metric": number, "model": _facts(model)}
    training = replace(Training.checked(optimizer, scaler, schedulers), facts=facts)
    saving = SavingCheckpoint(target, step)
    saving.begin(model, training, buffer_bytes, shard_bytes)
    if wait:
        saving.wait()
    return saving


def _number(metric: object) -> float:
    try:
        return float(cast("float", metric))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"metric must be a number, but is {metric!r}") from error


class SavingCheckpoint:
    """A checkpoint that is being written, or was. `path`: its folder when complete. `step`: as given."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        # All that is small was read, or could not be, when `_is_refused` tells.
        self._small: Outcome[None] = Outcome(_nothing)
        self._together: Together | None = None
        self._snapshot: Snapshot | None = None
        self._writer: Writer | None = None
        self._error: BaseException | None = None
        self._is_refused = False
        self._outcome: Outcome[None] | None = None
        self._finisher = Worker("roundpipe-checkpoint")
        self._waited_s = 0.0

    def begin(self, model: RoundPipeBase, training: Training, buffer_bytes: int, shard_bytes: int) -> None:
        """Queue the checkpoint, and wait until all small values have been read."""
        layout = layout_of(model)
        group = model.runtime.group
        if group is not None:
            # In the order of calls: a machine that saves while others go on training would wait for them forever.
            model.runtime.visit(partial(group.calls.say, "saving a checkpoint"))
        together = self._together = None if group is None else Together.of(group, self.path)
        made: Path | None = None
        try:
            if together is None or together.is_first:
                _refuse_taken(self.path)
                made = new_folder_for(self.path)
                (made / OWN).mkdir()
                layout.write_configuration(made)
            folder = made
            if together is not None:
                folder, self.path = together.agree_on_folder(made, self.path)
            assert folder is not None
            free = model.runtime.host_limit().free_bytes
            writer = self._writer = Writer(folder, min(buffer_bytes, free // 2))
            writer.start()
        except OSError as error:
            self._give_up(made, "the folder", error)
            raise self._named(error) from error
        except BaseException as error:
            self._give_up(made, "the folder", error)
            raise
        snapshot = self._snapshot = Snapshot(layout, training, together)

        def read(capture: Callable[[], Captured]) -> None:
            try:
                self._is_refused = True
                snapshot.note_small(capture())
                self._is_refused = False
                self._small.carry_out()
                snapshot.write_large(writer, shard_bytes)
            except BaseException as error:
                self._error = error
                if together is not None:
                    together.tell("the contents", error)
            finally:
                self._small.carry_out()

        try:
            captured = model.whole.capture(read)
        except BaseException as error:
            self._give_up(made, "the contents", error)
            raise
        self._outcome = self._finisher.submit(self._finish, captured, layout, folder)
        self._await_small(captured)
        if self._is_refused:
            # What it was given, not the disk.
            self._outcome.result()

    def _await_small(self, captured: Outcome[None]) -> None:
        while not self._small.wait(0.1):
            if captured.done():
                break
        snapshot = self._snapshot
        if snapshot is not None and snapshot.has_gradients:
            warnings.warn(
                "gradients of calls since the last step are not in the checkpoint; save after model.step(...)",
                CheckpointWarning,
                stacklevel=4,
            )

    # On the finisher's thread

    def _finish(self, captured: Outcome[None], layout: Layout, made: Path) -> None:
        writer, snapshot = self._writer, self._snapshot
        assert writer is not None
        assert snapshot is not None
        try:
            error = captured.exception() or self._error
            sums = writer.finish()
            if error is not None:
                raise error
            self._end(made, layout, snapshot, sums)
        except BaseException as error:
            self._give_up(made, "the files", error)
            named = self._error = self._named(error)
            _LOG.error("%s", named)
            if named is not error:
                raise named from error
            raise
        finally:
            self._waited_s = writer.waited_s
            if writer.waited_s:
                _LOG.info("the checkpoint %s held up the next step: %.3f s", self.path, writer.waited_s)
            self._writer = self._snapshot = None

    def _end(self, made: Path, layout: Layout, snapshot: Snapshot, sums: dict[str, Checksum]) -> None:
        together = self._together
        if together is not None:
            sync_tree(made)
            from_all = together.say("the files", {name: asdict(each) for name, each in sums.items()})
            sums = {name: Checksum(**each) for own in from_all for name, each in own.items()}
        if together is None or together.is_first:
            try:
                _write_rest(made, layout, snapshot)
                seal(made, sums)
                put_in_place(made, self.path)
            except BaseException as error:
                self._give_up(made, "the end", error)
                raise
        if together is not None:
            together.say("the end")
            together.is_over = True

    def _give_up(self, made: Path | None, what: str = "", error: BaseException | None = None) -> None:
        """Remove the unfinished folder; report the error to the other machines."""
        if self._together is not None and error is not None:
            self._together.tell(what, error)
        _remove(made)

    def _named(self, error: BaseException) -> BaseException:
        """Return the error to raise: that of a lost machine, if there is one."""
        lost = None if self._together is None else self._together.lost
        return lost or _in_context(self.path, error)

    # For users

    @property
    def waited_s(self) -> float:
        """Seconds that the full buffer has waited for the disk, for which the next step may have waited, too."""
        return self._waited_s if self._writer is None else self._writer.waited_s

    @property
    def is_first(self) -> bool:
        """Whether this machine has created the folder: the only machine, or the first of several."""
        return self._together is None or self._together.is_first

    def done(self) -> bool:
        """Return whether it is written, or has failed."""
        return self._outcome is not None and self._outcome.done()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is on the disk; return its folder.

        Raises `CheckpointError` if it could not be written, `TimeoutError` after `timeout_s` seconds.
        """
        assert self._outcome is not None
        self._outcome.result(timeout_s)
        return self.path


def _write_rest(made: Path, layout: Layout, snapshot: Snapshot) -> None:
    if snapshot.adapters:
        save: Any = layout.module.save_pretrained
        save(made, state_dict=snapshot.adapters)
    if (index := snapshot.description.pop("index", None)) is not None:
        write_durably(made / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
    write_durably(made / OWN / "training.json", json.dumps(snapshot.description, indent=1).encode())


def _in_context(path: Path, error: BaseException) -> BaseException:
    """Return an error that names the checkpoint; errors of the engine and of lost machines stay as they are."""
    if isinstance(error, RoundPipeError | DistError) or not isinstance(error, Exception):
        return error
    cause = error.strerror or str(error) if isinstance(error, OSError) else in_words(error)
    return CheckpointError(
        f"the checkpoint {path} could not be written: {cause}; training can go on, and other checkpoints are "
        "unchanged"
    )


def _remove(made: Path | None) -> None:
    if made is not None:
        with suppress(OSError):
            shutil.rmtree(made, ignore_errors=True)


def _checked(path: Any, model: object, step: object, buffer_bytes: object, shard_bytes: object) -> Path:
    if not isinstance(model, RoundPipeBase):
        raise TypeError(
            f"model must be a RoundPipe or AutoRoundPipe, but is a {type(model).__name__}; wrap it first"
        )
    for name, value, least in (
        ("step", step, 0),
        ("buffer_bytes", buffer_bytes, 1),
        ("shard_bytes", shard_bytes, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, but is {value!r}")
    return Path(os.path.abspath(path))


def _refuse_taken(target: Path) -> None:
    try:
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise _in_context(target, error) from error
    if is_taken:
        raise CheckpointError(
            f"{target} exists already and is not replaced; choose another folder, or remove it first"
        )


def _facts(model: RoundPipeBase) -> dict[str, Any]:
    """Return the saved facts of the model and of how it was trained."""
    return {
        "class": f"{type(model.named_model).__module__}.{type(model.named_model).__qualname__}",
        "optim_dtype": model.optim_dtype,
        "parts": {name: _part(part) for name, part in wrappers(model) if isinstance(part, RoundPipe)}
        or {name: _part(part) for name, part in getattr(model, "parts", {}).items()},
    }


def _part(part: RoundPipe) -> dict[str, Any]:
    config = part.model_run_config
    plain = {name: getattr(config, name) for name in ("preserve_rng_state", "recompute_grain", "num_microbatch")}
    plans: list[Mapping[str, Any]] = [
        {"mode": mode, "num_microbatch": count, "plan": _plan(plan)}
        for (mode, count), plan in part.engine.plans().items()
    ]
    return {"settings": plain, "devices": len(part.runtime.lanes), "plans": plans}


def _plan(plan: Any) -> dict[str, Any]:
    values = {one.name: getattr(plan, one.name) for one in fields(plan)}
    return {name: _ranges(value) for name, value in values.items()}


def _ranges(value: Any) -> Any:
    if isinstance(value, range):
        return [value.start, value.stop]
    return [_ranges(one) for one in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def _nothing() -> None:
    pass
