"""Names of a wrapped model's tensors: those of the user's own model, also where its row of layers has others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def names_in(row: nn.Module, named: nn.Module) -> dict[str, list[str]]:
    """The names in `row` of each tensor, by its name in `named`."""
    found: dict[torch.Tensor, list[str]] = {}
    for name, tensor in tensors(row):
        found.setdefault(tensor, []).append(name)
    return {name: found.get(tensor, []) for name, tensor in tensors(named)}


def renamed(state: Mapping[str, Any], named: nn.Module) -> Mapping[str, Any]:
    """The state with names of the user's model for those that version 0.1 saved."""
    own = {name for name, _ in tensors(named)}
    old = {f"model.{name}": name for name in own}
    if own & state.keys() or not old.keys() & state.keys():
        return state
    return {old.get(name, name): value for name, value in state.items()}


def rename_nested(state: dict[str, Any], prefix: str, names: Mapping[str, list[str]]) -> None:
    """Give each tensor below `prefix` its name in a wrapper's ``model``. `names`: see `names_in`."""
    found = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
    for name, value in found.items():
        for own in names.get(name, [name]):
            state[f"{prefix}model.{own}"] = value


def keep_tied(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], modules: Iterable[nn.Module]
) -> tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, torch.Tensor]]:
    """Tie again, in these modules, what was tied before its tensors were replaced.

    Returns the replacement of each old tensor, and what each old or new one is now: of several tensors for a tied
    parameter the last one counts, as when values are copied.
    """
    replaced = {old: after[name] for name, old in before.items()}
    latest = replaced | {after[name]: replaced[old] for name, old in before.items()}
    for module in modules:
        for table in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage] - as torch assigns
            _replace(table, latest)
    return replaced, latest


def _replace(table: dict[str, Any], latest: Mapping[torch.Tensor, torch.Tensor]) -> None:
    for name, tensor in table.items():
        if tensor is not None:
            table[name] = latest.get(tensor, tensor)
