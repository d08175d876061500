"""The division of a module: which of its submodules RoundPipe models run, and which of these share one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from rp_engine import RoundPipeRunConfig
from rp_engine.wrapping import Entrance, has_hooks
from rp_errors import warn_user
from rp_transfer import tensors_of
from torch import nn

from roundpipe.models.adapters import is_adapted
from roundpipe.models.part import Part
from roundpipe.models.side_outputs import hooked
from roundpipe.models.wrapped.options import WrapOptions


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each counted once.

    >>> module_bytes(nn.Linear(4, 4, bias=False))
    64
    """
    return sum(tensor.nbytes for _, tensor in tensors_of(module))


@dataclass(frozen=True, slots=True)
class Rules:
    """Which submodules become models. Sizes are bytes of parameters and buffers.

    A submodule of less than `lower_bytes` stays on the host; one of up to `upper_bytes` becomes a model; for a
    larger one its own submodules are considered in turn. An ``nn.Sequential``, whose children become layers, and a
    module without submodules become models at any size above `lower_bytes`. A module that is never called itself
    (an ``nn.ModuleList``), one that contains a skipped module, and one that contains a module with hooks never
    become models, only their submodules may: a module's own hooks run on the host and see whole batches. A module
    with adapters of PEFT is never divided. Modules that share parameters become one model, which runs each of
    them; one of which less than half is shared with modules outside it is divided.

    `skip`: modules that stay on the host. `override`: settings by module, over those for all.
    """

    lower_bytes: int
    upper_bytes: int
    skip: Container[nn.Module] = ()
    override: Mapping[nn.Module, RoundPipeRunConfig] = field(default_factory=dict[nn.Module, RoundPipeRunConfig])


class Splitter:
    """Lets models run submodules of a module, which stay where they are; `undo` ends that."""

    def __init__(self, root: nn.Module, name: str, rules: Rules, options: WrapOptions) -> None:
        self._name = name
        self._rules = rules
        self._options = options
        self._users = _users(root)
        self._chosen: dict[nn.Module, str] = {}
        self._entrances: list[Entrance] = []
        self._choose(root, "")

    @property
    def wrapped(self) -> tuple[nn.Module, ...]:
        """The submodules that models run."""
        return tuple(self._chosen)

    def split(self) -> None:
        """Make the models, as the rules say."""
        for group in _sharing(list(self._chosen)):
            self._wrap({self._chosen[module]: module for module in group})

    def undo(self) -> None:
        """Let all submodules run by themselves again."""
        for entrance in self._entrances:
            entrance.remove()

    def _choose(self, module: nn.Module, path: str) -> None:
        # Not `named_children`, which yields a submodule that is registered twice only once.
        for own, child in _children(module):
            where = f"{path}.{own}" if path else own
            if child in self._rules.skip or child in self._chosen or module_bytes(child) < self._rules.lower_bytes:
                continue
            if self._fits(child, where):
                self._chosen[child] = where
            elif not is_adapted(child):
                self._choose(child, where)

    def _fits(self, module: nn.Module, where: str) -> bool:
        if not is_called(module) or _any_in(module, self._rules.skip) or hooked({where: module}) is not None:
            return False
        if next(module.children(), None) is None or is_adapted(module):
            return True
        small = module_bytes(module) <= self._rules.upper_bytes
        return (small or isinstance(module, nn.Sequential)) and self._is_worth_sharing(module)

    def _is_worth_sharing(self, module: nn.Module) -> bool:
        # What shares is one model, whose weights are all uploaded for each of its modules.
        inside = set(module.modules())
        shared = sum(p.nbytes for p in module.parameters() if not self._users[p] <= inside)
        return shared == 0 or module_bytes(module) <= 2 * shared

    def _wrap(self, modules: Mapping[str, nn.Module]) -> None:
        _warn_of_buffers(modules)
        given = {where: self._options.under(self._rules.override.get(module)) for where, module in modules.items()}
        part = Part(modules, self._name, next(iter(given.values())) if len(given) == 1 else self._options)
        self._entrances += [part.enter(where, options.run_config) for where, options in given.items()]


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own.

    >>> is_called(nn.ModuleList()), is_called(nn.Linear(1, 1))
    (False, True)
    """
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


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


def _warn_of_buffers(modules: Mapping[str, nn.Module]) -> None:
    seen: dict[int, str] = {}
    for where, module in modules.items():
        for name, buffer in module.named_buffers():
            if (other := seen.setdefault(id(buffer), where)) != where:
                warn_user(
                    f"{other} and {where} share the buffer {name}, so the {len(modules)} modules that share "
                    "tensors are one part, whose weights are all uploaded for each of them; write the model as an "
                    "nn.Sequential, whose layers may share them",
                )
                return


def _sharing(modules: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The modules in groups: those that share a tensor, directly or through others, are together."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for module in modules:
        found = ({id(tensor) for _, tensor in tensors_of(module)}, [module])
        meeting = [group for group in groups if group[0] & found[0]]
        groups = [group for group in groups if not group[0] & found[0]]
        groups.append(reduce(lambda one, other: (one[0] | other[0], one[1] + other[1]), [*meeting, found]))
    return [members for _, members in groups]


def _any_in(module: nn.Module, skip: Container[nn.Module]) -> bool:
    return any(inner in skip for inner in module.modules())
