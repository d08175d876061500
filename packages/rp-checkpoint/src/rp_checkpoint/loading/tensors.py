"""Load one parameter or buffer, and its master, from a checkpoint."""

from __future__ import annotations

import torch
from rp_engine.saving import ModelTensor, is_split
from rp_optim import SplitMaster

from rp_checkpoint.files.tensor_file import sample
from rp_checkpoint.loading.differences import FitNotes
from rp_checkpoint.loading.opened import Opened


def master_of(held: ModelTensor | None) -> torch.nn.Parameter | None:
    """Return the master that is to be loaded, if there is one."""
    return None if held is None else held.master


def load_tensor(
    opened: Opened, name: str, tensor: torch.Tensor, held: ModelTensor | None, notes: FitNotes, *, is_behind: bool
) -> None:
    """Load a parameter or buffer, and its master where it trains now.

    `held`: where the model has its values; None if only `tensor` has them. `is_behind`: of the checkpoint, see
    `ModelBetweenSteps`.
    """
    entry = opened.description["tensors"][name]
    value = tensor.data if held is None else held.value
    if entry.get("published") is None:
        # Frozen, below adapters: not saved.
        if entry["sample"] != sample(value):
            notes.add("the adapters were trained on a model with other weights than this one's", name)
    elif held is None or held.master is None:
        _load_frozen(opened, name, value, notes, is_behind=is_behind)
    else:
        opened.stored(entry["published"]).read_into(value)
        _load_master(opened, name, held, held.master, notes, is_behind=is_behind)


def _load_frozen(opened: Opened, name: str, value: torch.Tensor, notes: FitNotes, *, is_behind: bool) -> None:
    entry = opened.description["tensors"][name]
    master = entry.get("master")
    # The last result, even if an asynchronous step had not published it yet.
    source = master if master is not None and is_behind else entry["published"]
    opened.stored(source).read_into(value, only_changes=True)
    if master is not None:
        notes.add("parameters that were trained are frozen now: they have the last step's result", name)


def _load_master(
    opened: Opened, name: str, held: ModelTensor, here: torch.nn.Parameter, notes: FitNotes, *, is_behind: bool
) -> None:
    """Load the master `here` of a parameter whose published value is loaded."""
    entry, value = opened.description["tensors"][name], held.value
    if entry.get("master") is None:
        if is_split(here):
            here.start_from(value)
        else:
            here.copy_(value)
        if entry["kind"] == "frozen":
            notes.add("parameters that were frozen are trained now, starting from the weights", name)
        return
    saved = opened.stored(entry["master"])
    if is_split(here):
        if is_behind and here.upper.data_ptr() == value.data_ptr():
            notes.add("calls read the last step's result at once, since masters in halves have no other", name)
        for start, part in saved.parts(here.dtype):
            here.write(start, part)
    elif not here.is_meta:
        saved.read_into(here)
    elif is_behind and held.is_master:
        # Another machine owns the master, and this weight is its upper half: round it as the owner does.
        upper = SplitMaster(value)
        for start, part in saved.parts(here.dtype):
            upper.write(start, part)
    if saved.dtype != here.dtype:
        notes.add(f"masters were {saved.dtype} and are {here.dtype} now", name)
    if str(value.dtype) != f"torch.{entry['dtype']}":
        notes.add(f"weights were torch.{entry['dtype']} and are {value.dtype} now", name)
