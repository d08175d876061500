"""A saved optimizer's state, matched with the optimizer that gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from rp_optim.host import HostOptimizer
from rp_optim.kernels.kept import SCALES, has_codes

from rp_checkpoint.errors import CheckpointMismatch
from rp_checkpoint.files.values import Tensor
from rp_checkpoint.loading.differences import FitNotes, first_of, refuse_other_names
from rp_checkpoint.loading.opened import Opened

# The dtypes of optimizer state in 8 bits.
_CODES = (torch.int8, torch.uint8)


class Matched:
    """A saved optimizer's state, matched with the optimizer that it is loaded into.

    Raises `CheckpointMismatch` if the two do not have the same parameters in the same number of groups.
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
        refuse_other_names(f"{opened.path} and the optimizer", set(self._saved_names()), set(self._names))
        if len(self._groups) != len(self._own):
            raise CheckpointMismatch(
                f"{opened.path} has {len(self._groups)} groups of parameters, but the optimizer {len(self._own)}; "
                "make the same groups"
            )
        self._saved_class, self._class = str(saved["class"]).rpartition(".")[2], type(optimizer).__name__
        self._refuse_other_settings()
        self._refuse_codes()

    def _refuse_codes(self) -> None:
        """Raise `CheckpointMismatch` if the state is in 8 bits, which only the optimizers of rp_optim convert."""
        states = (cast("dict[str, Any]", one) for one in self._states.values() if isinstance(one, dict))
        if not isinstance(self._optimizer, HostOptimizer) and any(map(has_codes, states)):
            raise CheckpointMismatch(
                f"{self._opened.path} has state in 8 bits, which {type(self._optimizer).__module__}."
                f"{self._class} does not support; load it into an optimizer of roundpipe.optim, which converts it"
            )

    def _refuse_other_settings(self) -> None:
        """Raise `CheckpointMismatch` if the optimizer is of another class and needs further settings."""
        lacking = {
            name for both in zip(self._given, self._groups, strict=True) for name in both[0].keys() - both[1]
        }
        if self._saved_class != self._class and lacking:
            raise CheckpointMismatch(
                f"{self._opened.path} has the state of {self._saved_class}, but the optimizer is {self._class}, "
                f"whose {first_of(sorted(lacking))} it does not have; load it without an optimizer, which then "
                "begins with new state"
            )

    @property
    def _given(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _saved_names(self) -> list[str]:
        return [name for group in self._groups for name in group["params"]]

    def load(self, notes: FitNotes) -> None:
        """Load the state."""
        place = {name: at for at, name in enumerate(self._names)}
        groups = [
            {**group, "params": [place[name] for name in own]}
            for group, own in zip(self._groups, self._own, strict=True)
        ]
        # The states of other machines' parameters stay in their files.
        here = {name for name, one in zip(self._names, self._parameters, strict=True) if not one.is_meta}
        # Only the optimizers of rp_optim read tensors when they need them.
        is_ours = isinstance(self._optimizer, HostOptimizer)
        decoded = self._opened.decoded_later if is_ours else self._opened.decoded
        state = {place[name]: decoded(value) for name, value in self._states.items() if name in here}
        self._note_dtypes(state, notes)
        if self._saved_class != self._class:
            notes.add(f"the optimizer was {self._saved_class} and is {self._class} now", self._names[0])
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _kept_as(self, master: torch.Tensor) -> str:
        kind = self._optimizer.state_kind if isinstance(self._optimizer, HostOptimizer) else "fp32"
        return {"fp32": str(master.dtype), "bf16": "torch.bfloat16", "8bit": "8 bits"}[kind]

    def _note_dtypes(self, state: Mapping[int, Any], notes: FitNotes) -> None:
        for at, values in state.items():
            master = self._parameters[at]
            now = self._kept_as(master)
            for name, value in cast("dict[str, Any]", values).items() if isinstance(values, dict) else ():
                # Counters and scales have other dtypes, even if a parameter has the same shape.
                if name == "step" or name.endswith(SCALES):
                    continue
                if isinstance(value, Tensor) and value.shape == master.shape:
                    was = "8 bits" if value.dtype in _CODES else str(value.dtype)
                    if was == now:
                        continue
                    notes.add(f"the optimizer's state was {was} and is {now} now", self._names[at])


def _stranger(parameter: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)} that is not the model's"
