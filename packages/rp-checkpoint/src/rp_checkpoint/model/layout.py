"""The names of a model's tensors, in the model and in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from rp_packing import PackedWeight
from torch import nn

Kind = Literal["model", "adapter"]


class Conversion(Protocol):
    """Weights that are saved in another form, such as stacked experts that are saved one by one."""

    @property
    def sources(self) -> Sequence[str]:
        """Their names in `CheckpointLayout.tensors`."""
        ...

    @property
    def results(self) -> Mapping[str, torch.Tensor]:
        """The converted tensors by saved name, on the meta device."""
        ...

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors to save."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How a model is saved.

    `tensors`: its parameters and buffers by their names in its state dict, each once; for a packed weight, its
    codes and scales. `computed`: the other values of the state dict. `exported`: maps names in the files to names
    of a whole model's weights. `dropped`: maps the further names of tied tensors to the name that is saved.
    `write_configuration`: writes configuration files into the folder, beside the weights. `write_adapters`: writes
    the adapters of a model of kind ``"adapter"`` there, of which it is given the state dict. `unrounded`: of which
    of them it is given the master's values, and in which dtype.
    """

    kind: Kind
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    computed: Mapping[str, Any]
    exported: Mapping[str, str] = field(default_factory=dict[str, str])
    conversions: tuple[Conversion, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])
    write_configuration: Callable[[Path], object] | None = None
    write_adapters: Callable[[Path, Mapping[str, torch.Tensor]], object] | None = None
    unrounded: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])


def layout_of(module: nn.Module) -> CheckpointLayout:
    """Return the layout of a module whose weights are saved under the names of its state dict.

    >>> layout = layout_of(nn.Linear(2, 3))
    >>> {name: tuple(tensor.shape) for name, tensor in layout.tensors.items()}, layout.exported
    ({'weight': (3, 2), 'bias': (3,)}, {'weight': 'weight', 'bias': 'bias'})
    """
    held, computed = divided_state(module)
    first: dict[int, str] = {}
    for name, tensor in held.items():
        first.setdefault(id(tensor), name)
    tensors = {inner: part for name in first.values() for inner, part in stored_as(name, held[name]).items()}
    dropped = {name: first[id(tensor)] for name, tensor in held.items() if first[id(tensor)] != name}
    return CheckpointLayout("model", module, tensors, computed, {name: name for name in tensors}, dropped=dropped)


def divided_state(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state dict in two: parameters and buffers, under all their names; and all other values."""
    every: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held = {name: value for name, value in every.items() if id(value) in own}
    return held, {name: value for name, value in every.items() if name not in held}


def stored_as(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is saved of a tensor, by name: itself, or the codes and scales of a packed weight."""
    if isinstance(tensor, PackedWeight):
        return {f"{name}.codes": tensor.codes, f"{name}.scales": tensor.scales}
    return {name: tensor}
