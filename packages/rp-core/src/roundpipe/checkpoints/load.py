"""`load_checkpoint`: goes on from a checkpoint, on any devices."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rp_optim.host import HostOptimizer
from rp_optim.kernels.kept import SCALES, has_codes
from rp_sched import Plan

from roundpipe.checkpoints.layout import Layout, layout_of
from roundpipe.checkpoints.manifest import OWN, check, checked_names, digest_of
from roundpipe.checkpoints.random_state import restore_random_states
from roundpipe.checkpoints.snapshot import FORMAT
from roundpipe.checkpoints.tensor_file import Stored, catalogue, sample
from roundpipe.checkpoints.values import decode
from roundpipe.engine.capture import Held
from roundpipe.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointWarning
from roundpipe.models.base import RoundPipeBase
from roundpipe.runtime.runtime import Runtime, lasting
from roundpipe.state.master import is_split

_LOG = logging.getLogger(__name__)

# What machines do together.
_LOADING = "loading a checkpoint"
# Of optimizer state in 8 bits.
_CODES = (torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What a checkpoint says beside what was loaded into the model and the optimizers.

    `step`, `data`, `metric`: as they were saved. `notes`: what was changed to fit, in words. `plans`: the plans
    of the calls, by the part's name ("" for a model in one part), mode and number of microbatches; with one as the
    ``execute_plan`` of a `RoundPipeRunConfig`, sums are rounded as before. `num_microbatch`: the setting, by part.
    """

    path: Path
    step: int
    data: Any
    metric: float | None
    notes: tuple[str, ...]
    plans: Mapping[tuple[str, str, int], Plan]
    num_microbatch: Mapping[str, int | None]


class Opened:
    """A checkpoint whose files are as they were written. `description`: its ``training.json``; `digest`: tells it.

    Raises `CheckpointDamaged`, which names the file, or `CheckpointError` if one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = check(path)
        self.digest = digest_of(path)
        self.description = _description(path)
        files = checked_names(names)
        self._own = {key: found for name in files[OWN] for key, found in catalogue(path / name).items()}
        self._model = {key: found for name in files[""] for key, found in catalogue(path / name).items()}

    def stored(self, key: str) -> Stored:
        """The tensor that the description names so."""
        outer, _, inner = key.partition("/")
        table, name = (self._model, inner) if outer == "model" else (self._own, key)
        if name not in table:
            raise CheckpointDamaged(f"{self.path} has no tensor {key}, which its training.json names")
        return table[name]

    def value(self, name: str) -> Any:
        """One entry of the description, with its tensors."""
        return self.decoded(self.description[name])

    def decoded(self, value: Any) -> Any:
        """A part of the description, with its tensors, which are new ones."""
        return decode(value, lambda name: self.stored(name).read())


def _description(path: Path) -> dict[str, Any]:
    file = path / OWN / "training.json"
    try:
        found = cast("dict[str, Any]", json.loads(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{file} cannot be read: {error}") from error
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {found.get('format')}, but this version of RoundPipe reads format {FORMAT}; "
            "load it "
            "with the version that wrote it"
        )
    return found


def load_checkpoint(
    path: str | os.PathLike[str],
    model: RoundPipeBase,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scaler: Any = None,
    schedulers: Any = (),
    random: bool = True,
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` wrote: training goes on as if it had not stopped.

    Args:
        path: a checkpoint.
        model: the same model, wrapped in any way, on any number and kind of devices. Its weights are overwritten.
        optimizer, scaler, schedulers: as many, and of the same parameters, as were saved; or none, and they are
            not loaded.
        random: whether the process's random number generators get their states, too.

    All files are read and compared with their checksums before anything is changed. Tensors then are read straight
    into the model's blocks and masters, and the optimizer's state into memory of its own.

    With the same plan (see `LoadedCheckpoint.plans`) and devices of the same kind, losses and weights are the
    same as without the stop, to the last bit. Masters of another dtype, parameters that are frozen now or were
    then, and an optimizer of another class are told by a `CheckpointWarning` and in `LoadedCheckpoint.notes`. The
    settings of the optimizer, such as its learning rate, are those that were saved.

    >>> from tempfile import TemporaryDirectory
    >>> from roundpipe import RoundPipe, Runtime, save_checkpoint
    >>> with Runtime("cpu:2") as runtime, TemporaryDirectory() as folder:
    ...     model = RoundPipe(torch.nn.Linear(4, 4), runtime=runtime)
    ...     saved = save_checkpoint(f"{folder}/step-5", model, step=5, data={"epoch": 1})
    ...     load_checkpoint(saved.path, model).data
    {'epoch': 1}

    Raises `CheckpointDamaged` for a folder that is not whole, with the file's name; `CheckpointMismatch` for one
    of another model or optimizer, with the first names that differ; `CheckpointError` if it cannot be read. The
    model is then as it was, unless a file became unreadable after it was checked: training is refused until a
    state is loaded.
    """
    if not isinstance(model, RoundPipeBase):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise TypeError(
            f"model must be a RoundPipe or AutoRoundPipe, but is a {type(model).__name__}; wrap it first"
        )
    optimizers, several = _several(optimizer), _several(schedulers)
    notes = _Notes()
    layout = layout_of(model)
    opened = _opened_by_all(
        Path(os.path.abspath(path)), model.runtime, _Wanted(layout, optimizers, several, scaler)
    )
    with model.runtime.launching(), lasting(), torch.no_grad():
        is_behind = bool(opened.description["is_behind"])
        held = {id(one.tensor): one for one in model.joint.begin_restoring(is_behind=is_behind)}
        masters = {name: _master(held.get(id(tensor))) for name, tensor in layout.tensors.items()}
        states = [_Matched(opened, *both, masters) for both in zip(optimizers, _saved(opened), strict=False)]
        model.joint.refuse_until_restored()
        for name, tensor in layout.tensors.items():
            _load_tensor(opened, name, tensor, held.get(id(tensor)), notes, is_behind=is_behind)
        for matched in states:
            matched.load(notes)
        model.joint.restored(is_behind=is_behind)
    _load_computed(opened, layout)
    _load_rest(opened, scaler, several)
    if random:
        restore_random_states(opened.value("random"))
    return _loaded(opened, notes)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a checkpoint is loaded into."""

    layout: Layout
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]
    scaler: Any

    def open(self, path: Path) -> Opened:
        """A checkpoint that fits."""
        opened = Opened(path)
        _compare(opened, self.layout)
        _compare_counts(opened, self.optimizers, self.schedulers, self.scaler)
        return opened


def _opened_by_all(path: Path, runtime: Runtime, wanted: _Wanted) -> Opened:
    """The checkpoint, which all machines have found whole, if there are several.

    Raises `MachineFailed` where another one could not open it, `rp_dist.Disagreement` where it is not the same.
    """
    group = runtime.group
    if group is None:
        return wanted.open(path)
    try:
        opened = wanted.open(path)
    except BaseException as error:
        runtime.launch(partial(group.calls.tell, _LOADING, error))
        raise
    runtime.launch(partial(group.calls.same, _LOADING, {"checkpoint": f"{path.name}, {opened.digest[:12]}"}))
    return opened


# What must be the same


def _compare(opened: Opened, layout: Layout) -> None:
    """Raise `CheckpointMismatch` if the checkpoint is not of this model."""
    kinds = {"model": "a whole model", "adapter": "a model with adapters, of which it has only these"}
    saved, path = opened.description["kind"], opened.path
    if saved != layout.kind:
        raise CheckpointMismatch(
            f"{path} is of {kinds[saved]}, but this is {kinds[layout.kind]}; "
            + (
                "add the same adapters before wrapping"
                if saved == "adapter"
                else "wrap the model without adapters, or add them to the result of from_pretrained and train anew"
            )
        )
    entries = opened.description["tensors"]
    _same_names(f"{path} and the model", set(entries), set(layout.tensors))
    for name, tensor in layout.tensors.items():
        if entries[name]["shape"] != list(tensor.shape):
            raise CheckpointMismatch(
                f"{name} has shape {tuple(entries[name]['shape'])} in {path}, but {tuple(tensor.shape)} in the "
                "model"
            )


def _same_names(what: str, saved: set[str], found: set[str]) -> None:
    if saved == found:
        return
    only_saved, only_found = sorted(saved - found), sorted(found - saved)
    raise CheckpointMismatch(
        f"{what} do not have the same tensors: {_first(only_saved)} only in the checkpoint, "
        f"{_first(only_found)} only here"
    )


def _first(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _compare_counts(opened: Opened, optimizers: tuple[Any, ...], schedulers: tuple[Any, ...], scaler: Any) -> None:
    for what, given, saved in (
        ("optimizers", len(optimizers), len(opened.description["optimizers"])),
        ("schedulers", len(schedulers), len(opened.description["schedulers"])),
    ):
        if given and given != saved:
            raise CheckpointMismatch(
                f"{opened.path} has {saved} {what}, but {given} were given; give as many, or none"
            )
    if scaler is not None and opened.description["scaler"] is None:
        raise CheckpointMismatch(f"{opened.path} has no scaler, but one was given; load it without")


# Tensors


class _Notes:
    """What was changed to fit, in words: each kind once, with the first tensor's name."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def add(self, what: str, name: str) -> None:
        """Note this of a tensor."""
        self._first.setdefault(what, name)

    def tell(self) -> tuple[str, ...]:
        """Issue a warning for each, and return them."""
        told = tuple(f"{what} (first: {name})" for what, name in self._first.items())
        for words in told:
            warnings.warn(words, CheckpointWarning, stacklevel=4)
        return told


def _master(held: Held | None) -> torch.nn.Parameter | None:
    return None if held is None else held.master


def _load_tensor(
    opened: Opened, name: str, tensor: torch.Tensor, held: Held | None, notes: _Notes, *, is_behind: bool
) -> None:
    entry = opened.description["tensors"][name]
    value = tensor.data if held is None else held.value
    published, master = entry.get("published"), entry.get("master")
    if published is None:
        # Frozen, below adapters: not saved.
        if entry["sample"] != sample(value):
            notes.add("the adapters were trained on a model with other weights than this one's", name)
        return
    here = _master(held)
    if here is None:
        # Frozen now: the last result, which an asynchronous step has not published yet.
        source = master if master is not None and is_behind else published
        opened.stored(source).read_into(value, only_changes=True)
        if master is not None:
            notes.add("parameters that were trained are frozen now: they have the last step's result", name)
        return
    opened.stored(published).read_into(value)
    if master is None:
        if is_split(here):
            here.start_from(value)
        else:
            here.copy_(value)
        if entry["kind"] == "frozen":
            notes.add("parameters that were frozen are trained now, from the weights on", name)
        return
    saved = opened.stored(master)
    if is_split(here):
        if is_behind and here.halves[0].data_ptr() == value.data_ptr():
            notes.add("calls read the last step's result at once, since masters in halves have no other", name)
        for start, part in saved.parts(here.dtype):
            here.write(start, part)
    elif not here.is_meta:
        saved.read_into(here)
    if saved.dtype != here.dtype:
        notes.add(f"masters were {saved.dtype} and are {here.dtype} now", name)
    if str(value.dtype) != f"torch.{entry['dtype']}":
        notes.add(f"weights were torch.{entry['dtype']} and are {value.dtype} now", name)


def _load_computed(opened: Opened, layout: Layout) -> None:
    found = opened.value("computed")
    if found:
        layout.module.load_state_dict(found, strict=False)


# Optimizers


def _saved(opened: Opened) -> list[dict[str, Any]]:
    return opened.description["optimizers"]


class _Matched:
    """A saved optimizer's state beside the optimizer that gets it.

    Raises `CheckpointMismatch` if the two do not have the same parameters, in as many groups.
    """

    def __init__(
        self,
        opened: Opened,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Any],
        masters: Mapping[str, torch.nn.Parameter | None],
    ) -> None:
        self._opened = opened
        self._optimizer = optimizer
        self._states: Mapping[str, Any] = saved["state"]
        self._groups = cast("list[dict[str, Any]]", opened.decoded(saved["param_groups"]))
        names = {id(master): name for name, master in masters.items() if master is not None}
        self._own = [[names.get(id(one), _stranger(one)) for one in group["params"]] for group in self._given]
        self._parameters = [one for group in self._given for one in group["params"]]
        self._names = [name for group in self._own for name in group]
        _same_names(f"{opened.path} and the optimizer", set(self._saved_names()), set(self._names))
        if len(self._groups) != len(self._own):
            raise CheckpointMismatch(
                f"{opened.path} has {len(self._groups)} groups of parameters, but the optimizer {len(self._own)}; "
                "make the same groups"
            )
        self._was, self._is = str(saved["class"]).rpartition(".")[2], type(optimizer).__name__
        self._refuse_other_settings()
        self._refuse_codes()

    def _refuse_codes(self) -> None:
        """Raise `CheckpointMismatch` if the state is in 8 bits, which only the optimizers of rp_optim convert."""
        states = (cast("dict[str, Any]", one) for one in self._states.values() if isinstance(one, dict))
        if not isinstance(self._optimizer, HostOptimizer) and any(map(has_codes, states)):
            raise CheckpointMismatch(
                f"{self._opened.path} has state in 8 bits, which the {type(self._optimizer).__module__}."
                f"{self._is} given does not know; load it into an optimizer of roundpipe.optim, which converts it"
            )

    def _refuse_other_settings(self) -> None:
        """Raise `CheckpointMismatch` if this is an optimizer of another class, which needs settings of its own."""
        lacking = {
            name for both in zip(self._given, self._groups, strict=True) for name in both[0].keys() - both[1]
        }
        if self._was != self._is and lacking:
            raise CheckpointMismatch(
                f"{self._opened.path} has the state of {self._was}, but the optimizer is {self._is}, whose "
                f"{_first(sorted(lacking))} it does not have; load it without an optimizer, and step anew"
            )

    @property
    def _given(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _saved_names(self) -> list[str]:
        return [name for group in self._groups for name in group["params"]]

    def load(self, notes: _Notes) -> None:
        """Load the state."""
        place = {name: at for at, name in enumerate(self._names)}
        groups = [
            {**group, "params": [place[name] for name in own]}
            for group, own in zip(self._groups, self._own, strict=True)
        ]
        # The states of other machines' parameters stay in their files.
        here = {name for name, one in zip(self._names, self._parameters, strict=True) if not one.is_meta}
        state = {place[name]: self._opened.decoded(value) for name, value in self._states.items() if name in here}
        self._note_dtypes(state, notes)
        if self._was != self._is:
            notes.add(f"the optimizer was {self._was} and is {self._is} now", self._names[0])
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _kept_as(self, master: torch.Tensor) -> str:
        kind = self._optimizer.state_kind if isinstance(self._optimizer, HostOptimizer) else "fp32"
        return {"fp32": str(master.dtype), "bf16": "torch.bfloat16", "8bit": "8 bits"}[kind]

    def _note_dtypes(self, state: Mapping[int, Any], notes: _Notes) -> None:
        for at, values in state.items():
            master = self._parameters[at]
            now = self._kept_as(master)
            for name, value in cast("dict[str, Any]", values).items() if isinstance(values, dict) else ():
                # Counters and scales have dtypes of their own, also where a parameter has the same shape.
                if name == "step" or name.endswith(SCALES):
                    continue
                if isinstance(value, torch.Tensor) and value.shape == master.shape:
                    was = "8 bits" if value.dtype in _CODES else str(value.dtype)
                    if was == now:
                        continue
                    told = f"the optimizer's state was {was} and is {now} now"
                    notes.add(told, self._names[at])


def _stranger(parameter: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)} that is not the model's"


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
    """A scaler's state as torch's has it."""
    if "latest" not in state:
        return dict(state)
    latest = dict(state["latest"])
    tracker = latest.pop("tracker")
    del latest["updates"]
    return {**latest, "_growth_tracker": tracker}


def _loaded(opened: Opened, notes: _Notes) -> LoadedCheckpoint:
    facts = opened.value("facts")
    parts = cast("dict[str, dict[str, Any]]", facts["model"]["parts"])
    return LoadedCheckpoint(
        path=opened.path,
        step=facts["step"],
        data=facts["data"],
        metric=facts["metric"],
        notes=notes.tell(),
        plans={
            (name, one["mode"], one["num_microbatch"]): _plan(one["plan"])
            for name, part in parts.items()
            for one in part["plans"]
        },
        num_microbatch={name: part["settings"]["num_microbatch"] for name, part in parts.items()},
    )


def _plan(saved: Mapping[str, Any]) -> Plan:
    return Plan(**{name: _ranges(name, value) for name, value in saved.items()})


def _ranges(name: str, value: Any) -> Any:
    if name in ("in_turn", "devices") or value is None:
        return value
    return range(*value) if name == "fused" else tuple(range(*one) for one in value)


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else (given,)
