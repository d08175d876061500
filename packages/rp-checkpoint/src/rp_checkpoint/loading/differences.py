"""Refuse, or warn about, differences between a checkpoint and the objects that it is loaded into."""

from __future__ import annotations

from typing import Any

from rp_errors import warn_user

from rp_checkpoint.errors import CheckpointMismatch, CheckpointWarning
from rp_checkpoint.loading.opened import Opened
from rp_checkpoint.model.layout import CheckpointLayout


def refuse_other_model(opened: Opened, layout: CheckpointLayout) -> None:
    """Raise `CheckpointMismatch` if the checkpoint is not of this model."""
    kinds = {"model": "a whole model", "adapter": "a model with adapters, of which it has only the adapters"}
    saved, path = opened.description["kind"], opened.path
    if saved != layout.kind:
        raise CheckpointMismatch(
            f"{path} is of {kinds[saved]}, but this is {kinds[layout.kind]}; "
            + (
                "add the same adapters before wrapping"
                if saved == "adapter"
                else "wrap the model without adapters, or add them to the result of from_pretrained for a new run"
            )
        )
    entries = opened.description["tensors"]
    refuse_other_names(f"{path} and the model", set(entries), set(layout.tensors))
    for name, tensor in layout.tensors.items():
        if entries[name]["shape"] != list(tensor.shape):
            raise CheckpointMismatch(
                f"{name} has shape {tuple(entries[name]['shape'])} in {path}, but {tuple(tensor.shape)} in the "
                "model"
            )


def refuse_other_names(what: str, saved: set[str], here: set[str]) -> None:
    """Raise `CheckpointMismatch`, with the first names that only one side has. `what`: both sides, as text."""
    if saved == here:
        return
    only_saved, only_found = sorted(saved - here), sorted(here - saved)
    raise CheckpointMismatch(
        f"{what} do not have the same tensors: {first_of(only_saved)} only in the checkpoint, "
        f"{first_of(only_found)} only here"
    )


def first_of(names: list[str]) -> str:
    """Return the first three names, and how many more there are.

    >>> first_of(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_other_counts(
    opened: Opened, optimizers: tuple[Any, ...], schedulers: tuple[Any, ...], scaler: Any
) -> None:
    """Raise `CheckpointMismatch` if other numbers of objects were given than saved; none of a kind is allowed."""
    for what, given, saved in (
        ("optimizers", len(optimizers), len(opened.description["optimizers"])),
        ("schedulers", len(schedulers), len(opened.description["schedulers"])),
    ):
        if given and given != saved:
            raise CheckpointMismatch(
                f"{opened.path} has {saved} {what}, but {given} were given; pass as many, or none"
            )
    if scaler is not None and opened.description["scaler"] is None:
        raise CheckpointMismatch(f"{opened.path} has no scaler, but one was given; load it without")


def note_left_out(opened: Opened, schedulers: tuple[Any, ...], scaler: Any, notes: FitNotes) -> None:
    """Note a scaler and schedulers that were saved, and are not loaded since none were given."""
    if opened.description["schedulers"] and not schedulers:
        notes.add("the schedulers that were saved are not loaded; give schedulers=... to go on with their rates")
    if opened.description["scaler"] is not None and scaler is None:
        notes.add("the scaler that was saved is not loaded; give scaler=... to go on with its scale")


class FitNotes:
    """Notes of what was changed to fit: each kind of change once, with the first tensor's name."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def add(self, what: str, name: str = "") -> None:
        """Note a change of a tensor, or of all if `name` is empty."""
        self._first.setdefault(what, name)

    def tell(self) -> tuple[str, ...]:
        """Issue a warning for each note, and return the notes."""
        notes = tuple(f"{what} (first: {name})" if name else what for what, name in self._first.items())
        for note in notes:
            warn_user(note, CheckpointWarning)
        return notes
