"""Find what of a model can be adapted: linear layers of attention and others, stacked experts, and routers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from rp_presets import lists_of_layers
from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage] - the base of all convolutions

from rp_adapters.names import PARTS

# What mixes tokens, by the names of modules and of their classes: attention, and what stands in its place.
_MIXES_TOKENS = re.compile(r"attn|attention|mixer|mamba|ssm|rnn|recurrent|temporal|shortconv|deltanet|rwkv")
_IN_LIST_OF_EXPERTS = re.compile(r"(.*)\.experts\.\d+(\.|$)")
_STACK = 3
_MATRIX = 2


def parts_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of a model's adaptable modules and parameters by part, in the model's order.

    A linear layer has the name of its module, which PEFT calls a target module. Stacked experts, and routers that
    are no linear layers, have those of parameters, PEFT's target parameters. The output head is in no part.

    >>> layer = nn.ModuleDict({"self_attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})
    >>> parts_of(nn.ModuleDict({"layers": nn.ModuleList([layer])}))["attention"]
    ['layers.0.self_attn']
    """
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    stacks, head = stacks_of(model), _head(model)
    blocks = _blocks(model, stacks)
    for name, module in modules_of(model):
        linear = is_linear(module)
        if _routes(name, module, blocks):
            found["router"].append(name if linear else f"{name}.weight")
        elif linear and module is not head:
            found[_part_of(model, name)].append(name)
        found["experts"] += stacks.get(name, ())
    return found


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their names."""
    yield from cast("Any", model).named_modules()


def is_linear(module: nn.Module) -> bool:
    """Return whether PEFT counts a module among all linear layers: torch's, or GPT-2's with transposed weights."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def stacks_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of parameters that are stacks of experts' matrices, by the names of their modules."""
    found: dict[str, list[str]] = {}
    for layers, modules in lists_of_layers(model).items():
        for inside, module in modules_of(modules):
            # A first dimension of 1 is no stack, as that of position embeddings.
            own = [
                f"{layers}.{inside}.{name}"
                for name, parameter in module.named_parameters(recurse=False)
                if parameter.ndim == _STACK and min(parameter.shape) > 1 and not isinstance(module, _ConvNd)
            ]
            if own:
                found[f"{layers}.{inside}"] = own
    return found


def _blocks(model: nn.Module, stacks: dict[str, list[str]]) -> dict[str, int]:
    """Return the number of experts of each module that has some, and a router beside them, by its name."""
    blocks = {
        name.rpartition(".")[0]: len(model.get_parameter(parameters[0])) for name, parameters in stacks.items()
    }
    for name, module in modules_of(model):
        if isinstance(module, nn.ModuleList) and name.endswith(".experts"):
            blocks[name.removesuffix(".experts")] = len(module)
    return blocks


def _routes(name: str, module: nn.Module, blocks: dict[str, int]) -> bool:
    """Return whether a module has one output for each expert beside it, or one that weighs shared experts."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != _MATRIX or type(module).__name__ == "Conv1D":
        return False
    around = (name[: at.start()] for at in reversed(list(re.finditer(r"\.", name))))
    count = next((blocks[block] for block in around if block in blocks), None)
    return count is not None and len(weight) in (count, 1) and not _IN_LIST_OF_EXPERTS.match(name)


def _part_of(model: nn.Module, name: str) -> str:
    if _IN_LIST_OF_EXPERTS.match(name):
        return "experts"
    mixes = any(_MIXES_TOKENS.search(word.lower()) for word in _words(model, name))
    return "attention" if mixes else "dense"


def _words(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the names and classes of a module, and of those around it inside its layer."""
    parts = name.split(".")
    inside = next((at for at in range(len(parts) - 1, -1, -1) if parts[at].isdigit()), -1) + 1
    for count in range(inside + 1, len(parts) + 1):
        yield parts[count - 1]
        yield type(model.get_submodule(".".join(parts[:count]))).__name__


def _head(model: nn.Module) -> nn.Module | None:
    get: Any = getattr(model, "get_output_embeddings", None)
    return cast("nn.Module | None", get()) if callable(get) else None
