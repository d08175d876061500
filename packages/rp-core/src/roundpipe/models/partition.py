"""Replacement of a module's large submodules by RoundPipe models, in place."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rp_transfer import tensors_of
from torch import nn

from roundpipe.device.replica import has_hooks
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.settings.run_config import RoundPipeRunConfig


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each counted once.

    >>> module_bytes(nn.Linear(4, 4, bias=False))
    64
    """
    return sum(tensor.nbytes for _, tensor in tensors_of(module))


class Part(RoundPipe):
    """A RoundPipe model inside another module; its state dict keeps the names of the submodule it replaced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(_insert_model)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `RoundPipe.forward`. Refuses a key-value cache, which all microbatches would write.

        Raises `ValueError` for such a cache.
        """
        for value in (*args, *kwargs.values()):
            if hasattr(value, "get_seq_length") and hasattr(value, "update"):
                raise ValueError(
                    f"{self.name} got a key-value cache (a {type(value).__name__}), which all microbatches would "
                    "write; call the model with use_cache=False, or set that in its config"
                )
        return super().forward(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped submodule's state dict."""
        return self.model.state_dict(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _insert_model(part: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    del part
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}model.{key.removeprefix(prefix)}"] = state.pop(key)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which submodules become models. Sizes are bytes of parameters and buffers.

    A submodule of less than `lower_bytes` stays on the host; one of up to `upper_bytes` becomes a model; for a
    larger one its own submodules are considered in turn. An ``nn.Sequential``, whose children become layers, and a
    module without submodules become models at any size above `lower_bytes`. A module that is never called itself
    (an ``nn.ModuleList``), one that contains a skipped module, and one that shares a parameter with a module
    outside it never become models, only their submodules may: the shared parameter must stay on the host.

    `skip`: modules that stay on the host. `override`: settings by module, over `config`.
    """

    lower_bytes: int
    upper_bytes: int
    skip: Container[nn.Module] = ()
    override: Mapping[nn.Module, RoundPipeRunConfig] = field(default_factory=dict[nn.Module, RoundPipeRunConfig])
    config: RoundPipeRunConfig = field(default_factory=RoundPipeRunConfig)


class Splitter:
    """Replaces submodules of a module by models; `undo` restores them."""

    def __init__(self, root: nn.Module, name: str, rules: Rules, roundpipe_kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._rules = rules
        self._kwargs = roundpipe_kwargs
        self._users = _users(root)
        self._made: dict[nn.Module, Part] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    @property
    def wrapped(self) -> tuple[nn.Module, ...]:
        """The submodules that models have replaced."""
        return tuple(self._made)

    def split(self, module: nn.Module, path: str = "") -> None:
        """Replace submodules of `module` by models, as the rules say; `path` is its name in the root."""
        # Not `named_children`, which yields a submodule that is registered twice only once.
        for own, child in list(_children(module)):
            where = f"{path}.{own}" if path else own
            if child in self._rules.skip or module_bytes(child) < self._rules.lower_bytes:
                continue
            if child in self._made or self._fits(child):
                self._replace(module, own, child, where)
            elif next(child.children(), None) is None:
                self._warn(child, where)
            else:
                self.split(child, where)

    def undo(self) -> None:
        """Restore all replaced submodules."""
        for module, own, child in self._replaced:
            module.add_module(own, child)

    def _fits(self, module: nn.Module) -> bool:
        if not is_called(module) or self._shares(module) or _any_in(module, self._rules.skip):
            return False
        small = module_bytes(module) <= self._rules.upper_bytes
        return small or isinstance(module, nn.Sequential) or next(module.children(), None) is None

    def _shares(self, module: nn.Module) -> bool:
        inside = set(module.modules())
        return any(not self._users[parameter] <= inside for parameter in module.parameters())

    def _replace(self, module: nn.Module, own: str, child: nn.Module, where: str) -> None:
        if child not in self._made:
            config = config_for(child, self._rules)
            self._made[child] = Part(child, name=f"{self._name}.{where}", model_run_config=config, **self._kwargs)
        module.add_module(own, self._made[child])
        self._replaced.append((module, own, child))

    def _warn(self, module: nn.Module, where: str) -> None:
        warnings.warn(
            f"{where} ({type(module).__name__}) stays on the host, where it is slow, since it shares a parameter "
            "with another part of the model; write the model as an nn.Sequential, whose layers may share them",
            stacklevel=2,
        )


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own.

    >>> is_called(nn.ModuleList()), is_called(nn.Linear(1, 1))
    (False, True)
    """
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def config_for(module: nn.Module, rules: Rules) -> RoundPipeRunConfig:
    """The settings for one submodule: its override, if any, over those for all."""
    return rules.override[module].over(rules.config) if module in rules.override else rules.config


def flat_row(row: nn.Sequential, upper_bytes: int) -> nn.Sequential:
    """The same sequence, with nested ``nn.Sequential`` larger than `upper_bytes` replaced by their layers.

    >>> inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> len(flat_row(nn.Sequential(inner, nn.Tanh()), 100))
    3
    """
    layers = list(_flat(row, upper_bytes))
    return row if layers == list(row) else nn.Sequential(*layers)


def _flat(row: nn.Sequential, upper_bytes: int) -> Iterator[nn.Module]:
    for layer in row:
        if type(layer) is nn.Sequential and module_bytes(layer) > upper_bytes and not has_hooks(layer):
            yield from _flat(layer, upper_bytes)
        else:
            yield layer


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    own: dict[str, nn.Module | None] = vars(module)["_modules"]
    return ((name, child) for name, child in own.items() if child is not None)


def _users(root: nn.Module) -> Mapping[nn.Parameter, set[nn.Module]]:
    users: defaultdict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter].add(module)
    return users


def _any_in(module: nn.Module, skip: Container[nn.Module]) -> bool:
    return any(inner in skip for inner in module.modules())
