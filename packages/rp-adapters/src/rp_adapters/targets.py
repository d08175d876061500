"""Say in PEFT's terms which modules and which parameters of a model get adapters."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rp_trainer.errors import Refused
from torch import nn

from rp_adapters.choice import Adapters
from rp_adapters.names import ALL_LINEAR, is_pattern
from rp_adapters.parts import parts_of, stacks_of

# Two matrices of an expert in one: PEFT gives them twice the rank, and so do we, whatever the family.
_FUSED = "gate_up_proj"
_WITHIN_LAYER = re.compile(r".*\.\d+\.")


@dataclass(frozen=True, slots=True)
class Targets:
    """`modules`: names, or an expression, as `LoraConfig.target_modules`; `parameters`: as `target_parameters`.

    `fused`: those of the parameters that are two matrices in one.
    """

    modules: list[str] | str
    parameters: list[str]
    fused: list[str]

    def settings(self, adapters: Adapters) -> dict[str, Any]:
        """Return the arguments of `peft.LoraConfig` that say where adapters are, and those of other ranks."""
        rank, alpha = adapters.settings["r"], adapters.settings["lora_alpha"]
        patterns = [re.escape(name) for name in self.fused]
        return {
            "target_modules": self.modules,
            "target_parameters": self.parameters or None,
            "rank_pattern": dict.fromkeys(patterns, 2 * rank),
            "alpha_pattern": dict.fromkeys(patterns, 2 * alpha),
        }


def targets_in(model: nn.Module, adapters: Adapters) -> Targets:
    """Return where a model gets adapters. Raises `Refused` for names and parts that it does not have."""
    if adapters.targets is None:
        return _of_parts(model, adapters.parts)
    if adapters.targets == (ALL_LINEAR,):
        return Targets(ALL_LINEAR, [], [])
    if len(adapters.targets) == 1 and is_pattern(adapters.targets[0]):
        return _matching(model, adapters.targets[0])
    return _named(model, adapters.targets)


def _of_parts(model: nn.Module, parts: Sequence[str]) -> Targets:
    found = parts_of(model)
    names = [name for part in parts for name in found[part]]
    if not names:
        has = ", ".join(part for part, own in found.items() if own) or "none of them"
        wanted = ", ".join(parts)
        raise Refused(f"--lora-parts: a {type(model).__name__} has nothing to adapt in {wanted}; it has {has}")
    modules = module_names(model)
    # PEFT takes some names for those of stacked experts, wherever they are: weights can be named all the same.
    taken = _taken(model, {_leaf(name) for name in names if name in modules})
    by_weight = [name for name in names if name in modules and _leaf(name) in taken]
    others = [name for name in names if name in modules and name not in by_weight]
    parameters = [name for name in names if name not in modules] + [f"{name}.weight" for name in by_weight]
    fused = [name for name in _stacks(model) if name in parameters and _leaf(name) == _FUSED]
    every = parameter_names(model)
    return Targets(_shortest(others, modules), _shortest(parameters, every), _shortest(fused, every))


def _matching(model: nn.Module, pattern: str) -> Targets:
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise Refused(f"--lora-targets {pattern} is no regular expression: {error}") from None
    return Targets(pattern, [name for name in _stacks(model) if wanted.fullmatch(name)], [])


def _named(model: nn.Module, names: Sequence[str]) -> Targets:
    modules, parameters = module_names(model), parameter_names(model)
    in_modules = [name for name in names if _ends(name, modules)]
    others = [name for name in names if name not in in_modules]
    of_old = _taken(model, others)
    in_parameters = [name for name in others if name not in of_old and _ends(name, parameters)]
    missing = [name for name in others if name not in (*of_old, *in_parameters)]
    if missing:
        raise Refused(
            f"--lora-targets: a {type(model).__name__} has no layers named {', '.join(missing)}; it has "
            f"{_listed({_leaf(name) for own in parts_of(model).values() for name in own})}"
        )
    _refuse_containers(model, in_modules)
    return Targets([*in_modules, *of_old], in_parameters, [])


def _refuse_containers(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names of modules that have adapters in them, but none of their own, as attention or all experts."""
    every = [one for own in parts_of(model).values() for one in own]
    for name in names:
        inside = {_end(one) for one in every if f".{name}." in f".{one.rpartition('.')[0]}."}
        # PEFT takes the names of some routers for those of their weights.
        if inside and not _is_taken(model, name):
            raise Refused(f"--lora-targets: {name} is not a layer, but has some: name {_listed(inside)}")


def _end(name: str) -> str:
    """Return the last part of a name, with the one before it if the last says nothing."""
    return ".".join(name.split(".")[-2 if name.endswith(".weight") else -1 :])


def _taken(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the names that PEFT takes for names of experts or a router of earlier files."""
    return [name for name in names if _is_taken(model, name)]


def _is_taken(model: nn.Module, name: str) -> bool:
    try:
        return name not in converted(model, {"target_modules": [name]}).target_modules
    except ValueError:
        # One of two names of what is a single stack.
        return True


def converted(model: nn.Module, settings: dict[str, Any]) -> Any:
    """Return the `LoraConfig` of these settings as PEFT applies it, with the names of this model's experts.

    Raises `ValueError` for names that cannot be told apart.
    """
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion

    maker, conversion = cast("tuple[Any, Any]", (LoraConfig, transformers_weight_conversion))
    config = maker(**copy.deepcopy(settings))
    conversion.convert_peft_config_for_transformers(config, model, None)
    return config


def module_names(model: nn.Module) -> dict[str, None]:
    """Return the names of a model's modules, in order."""
    return dict.fromkeys(name for name, _ in cast("Any", model).named_modules())


def parameter_names(model: nn.Module) -> list[str]:
    """Return the names of a model's parameters, in order."""
    return [name for name, _ in model.named_parameters()]


def _stacks(model: nn.Module) -> list[str]:
    return [name for own in stacks_of(model).values() for name in own]


def _ends(end: str, names: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for name in names)


def _shortest(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """Return ends of names, without layers, that name these and nothing else; otherwise the names."""
    ends = dict.fromkeys(_WITHIN_LAYER.sub("", name) for name in names)
    if {one for one in every if any(_ends(end, [one]) for end in ends)} == set(names):
        return list(ends)
    return list(names)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
