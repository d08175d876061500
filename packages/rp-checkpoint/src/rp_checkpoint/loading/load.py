"""`load_checkpoint`: continue from a checkpoint, on any devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rp_engine.context import lasting
from rp_sched import Plan

from rp_checkpoint.loading.differences import (
    FitNotes,
    note_left_out,
    refuse_other_counts,
    refuse_other_model,
)
from rp_checkpoint.loading.opened import Opened
from rp_checkpoint.loading.optimizer_state import Matched
from rp_checkpoint.loading.tensors import load_tensor, master_of
from rp_checkpoint.model.facts import decoded_plan
from rp_checkpoint.model.layout import CheckpointLayout
from rp_checkpoint.model.saveable import Saveable, check_saveable
from rp_checkpoint.random_state import restore_random_states
from rp_checkpoint.training import TrainingObjects

# The name of this operation in messages between machines.
_LOADING = "loading a checkpoint"


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The contents of a checkpoint that are not loaded into the model or the optimizers.

    `step`, `data`, `metric`: as they were saved. `notes`: what was changed to fit, as text. `plans`: the plans of
    the calls, by the part's name ("" for a model in one part), mode and number of microbatches. With such a plan
    as the ``execute_plan`` of a `RoundPipeRunConfig`, sums are rounded as before. `num_microbatch`: the setting,
    by part.
    """

    path: Path
    step: int
    data: Any
    metric: float | None
    notes: tuple[str, ...]
    plans: Mapping[tuple[str, str, int], Plan]
    num_microbatch: Mapping[str, int | None]


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Saveable,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scaler: Any = None,
    schedulers: Any = (),
    random: bool = True,
) -> LoadedCheckpoint:
    """Load a checkpoint that `save_checkpoint` wrote; training continues as if it had not stopped.

    Args:
        path: a checkpoint.
        model: the same model, wrapped in any way, on any number and kind of devices. Its weights are overwritten.
        optimizer, scaler, schedulers: as many, and of the same parameters, as were saved; those that are None or
            empty are not loaded. A `CheckpointWarning` says so if the optimizer is loaded without its schedulers
            or scaler.
        random: whether to restore the states of the process's random number generators, too.

    All files are read and compared with their checksums before anything is changed. Then tensors are read directly
    into the model's blocks and masters, and the optimizer's state into new memory.

    With the same plan (see `LoadedCheckpoint.plans`) and devices of the same kind, losses and weights are the
    same as without the stop, to the last bit. Masters of another dtype, parameters that are frozen now or were
    then, and an optimizer of another class cause a `CheckpointWarning` and an entry of `LoadedCheckpoint.notes`.
    The settings of the optimizer, such as its learning rate, are those that were saved.

    >>> from tempfile import TemporaryDirectory
    >>> from roundpipe import RoundPipe, Runtime, save_checkpoint
    >>> with Runtime("cpu:2") as runtime, TemporaryDirectory() as folder:
    ...     model = RoundPipe(torch.nn.Linear(4, 4), runtime=runtime)
    ...     saved = save_checkpoint(f"{folder}/step-5", model, step=5, data={"epoch": 1})
    ...     load_checkpoint(saved.path, model).data
    {'epoch': 1}

    Raises `CheckpointDamaged` for an incomplete or changed folder, with the file's name; `CheckpointMismatch` for
    a checkpoint of another model or optimizer, with the first names that differ; `CheckpointError` if it cannot be
    read; `HostMemoryShort` if there is no host memory for the masters and second weight blocks that it needs. The
    model is then unchanged, unless a file became unreadable after it was checked: training is then refused until a
    state is loaded.
    """
    check_saveable(model)
    training = TrainingObjects.checked(optimizer, scaler, schedulers)
    optimizers = training.optimizers
    notes = FitNotes()
    layout = model.checkpoint_layout()
    opened = _opened_by_all(Path(os.path.abspath(path)), model, _Wanted(layout, training))
    with model.runtime.launching(), lasting(), torch.no_grad():
        restoring, is_behind = model.whole.restoring, bool(opened.description["is_behind"])
        held = {id(one.tensor): one for one in restoring.begin(is_behind=is_behind)}
        masters = {name: master_of(held.get(id(tensor))) for name, tensor in layout.tensors.items()}
        states = [Matched(opened, *both, masters) for both in zip(optimizers, _saved(opened), strict=False)]
        restoring.refuse_training(is_behind=is_behind)
        for name, tensor in layout.tensors.items():
            load_tensor(opened, name, tensor, held.get(id(tensor)), notes, is_behind=is_behind)
        for matched in states:
            matched.load(notes)
        restoring.end(is_behind=is_behind)
    _load_computed(opened, layout)
    _load_rest(opened, scaler, training.schedulers)
    if optimizers:
        note_left_out(opened, training.schedulers, scaler, notes)
    if random:
        restore_random_states(opened.value("random"))
    return _loaded(opened, notes)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The objects that a checkpoint is loaded into."""

    layout: CheckpointLayout
    training: TrainingObjects

    def open(self, path: Path) -> Opened:
        """Open a checkpoint; raise if it does not fit."""
        opened = Opened(path)
        refuse_other_model(opened, self.layout)
        training = self.training
        refuse_other_counts(opened, training.optimizers, training.schedulers, training.scaler)
        return opened


def _opened_by_all(path: Path, model: Saveable, wanted: _Wanted) -> Opened:
    """Open a checkpoint; with several machines, on all of them.

    Raises `MachineFailed` if another machine could not open it, `rp_dist.Disagreement` if theirs is not the same.
    """
    runtime = model.runtime
    with runtime.peers.telling_early(_LOADING, runtime.launch, lambda: False):
        opened = wanted.open(path)
        model.take_settings({name: part["settings"] for name, part in _parts(opened).items()})

    def facts() -> dict[str, str]:
        return {"checkpoint": f"{path.name}, {opened.digest[:12]}"}

    runtime.launch(partial(runtime.peers.agree, _LOADING, facts, None))
    return opened


def _load_computed(opened: Opened, layout: CheckpointLayout) -> None:
    computed = opened.value("computed")
    if computed:
        layout.module.load_state_dict(computed, strict=False)


# Optimizers


def _saved(opened: Opened) -> list[dict[str, Any]]:
    return opened.description["optimizers"]


# The rest


def _load_rest(opened: Opened, scaler: Any, schedulers: Iterable[Any]) -> None:
    if scaler is not None:
        state = opened.value("scaler")
        exact: Callable[[Any], None] | None = getattr(scaler, "load_exact_state", None)
        if exact is not None and "latest" in state:
            exact(state)
        else:
            scaler.load_state_dict(_plain(state))
    for scheduler, state in zip(schedulers, opened.value("schedulers"), strict=False):
        scheduler.load_state_dict(state)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scaler's state in the format of torch's scaler."""
    if "latest" not in state:
        return dict(state)
    latest = dict(state["latest"])
    tracker = latest.pop("tracker")
    del latest["updates"]
    return {**latest, "_growth_tracker": tracker}


def _parts(opened: Opened) -> dict[str, dict[str, Any]]:
    """Return how each part of the model was trained."""
    return cast("dict[str, dict[str, Any]]", opened.value("facts")["model"]["parts"])


def _loaded(opened: Opened, notes: FitNotes) -> LoadedCheckpoint:
    facts, parts = opened.value("facts"), _parts(opened)
    return LoadedCheckpoint(
        path=opened.path,
        step=facts["step"],
        data=facts["data"],
        metric=facts["metric"],
        notes=notes.tell(),
        plans={
            (name, one["mode"], one["num_microbatch"]): decoded_plan(one["plan"])
            for name, part in parts.items()
            for one in part["plans"]
        },
        num_microbatch={name: part["settings"]["num_microbatch"] for name, part in parts.items()},
    )
