"""Load one parameter or buffer, and its master, from a checkpoint."""

from __future__ import annotations

import torch
from rp_engine.saving import ModelTensor, is_split
from rp_optim import SplitMaster

from rp_checkpoint.files.tensor_file import sample
from rp_checkpoint.loading.differences import Notes
from rp_checkpoint.loading.opened import Opened


def master_of(held: ModelTensor | None) -> torch.nn.Parameter | None:
    return None if held is None else held.master


def load_tensor(
    opened: Opened, name: str, tensor: torch.Tensor, held: ModelTensor | None, notes: Notes, *, is_behind: bool
) -> None:
    entry = opened.description["tensors"][name]
    value = tensor.data if held is None else held.value
    published, master = entry.get("published"), entry.get("master")
    if published is None:
        # Frozen, below adapters: not saved.
        if entry["sample"] != sample(value):
            notes.add("the adapters were trained on a model with other weights than this one's", name)
        return
    here = master_of(held)
    if here is None:
        # Frozen now: load the last result, even if an asynchronous step had not published it yet.
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
            notes.add("parameters that were frozen are trained now, starting from the weights", name)
        return
    saved = opened.stored(master)
    if is_split(here):
        if is_behind and here.upper.data_ptr() == value.data_ptr():
            notes.add("calls read the last step's result at once, since masters in halves have no other", name)
        for start, part in saved.parts(here.dtype):
            here.write(start, part)
    elif not here.is_meta:
        saved.read_into(here)
    elif is_behind and held is not None and held.is_master:
        # Another machine owns the master, and this weight is its upper half: round it as the owner does.
        upper = SplitMaster(value)
        for start, part in saved.parts(here.dtype):
            upper.write(start, part)
    if saved.dtype != here.dtype:
        notes.add(f"masters were {saved.dtype} and are {here.dtype} now", name)
    if str(value.dtype) != f"torch.{entry['dtype']}":
        notes.add(f"weights were torch.{entry['dtype']} and are {value.dtype} now", name)
