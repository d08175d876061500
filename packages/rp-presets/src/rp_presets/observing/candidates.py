"""Find the lists of modules in a model that may be its layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn


def lists_of_layers(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of modules in the model by name, largest first.

    >>> lists_of_layers(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})).keys()
    dict_keys(['layers'])
    """
    lists = dict(_outermost(model, ""))
    return dict(sorted(lists.items(), key=lambda item: -size(item[1])))


def size(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and len(child) and size(child):
            yield where, child
        else:
            yield from _outermost(child, where)


def spine_of(paths: Collection[str]) -> frozenset[str]:
    """Return the names of all modules that contain the modules with these names.

    >>> sorted(spine_of(["model.decoder.layers"]))
    ['', 'model', 'model.decoder']
    """
    return frozenset(".".join(path.split(".")[:count]) for path in paths for count in range(len(path.split("."))))
