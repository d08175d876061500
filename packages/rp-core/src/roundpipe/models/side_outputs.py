"""Hooks inside a part: what transformers collects by hooks is returned, hooks of users are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rp_engine.errors import RoundPipeError
from rp_engine.wrapping import hooks_of, named_modules
from torch import nn

# Where transformers (5.0 and newer) has the hooks that collect a model's `hidden_states`, `attentions` and
# `router_logits`. It is looked up, not imported: it is there if it has registered such a hook.
_CAPTURING = "transformers.utils.output_capturing"
_SELECTION = "_hidden_states_layers"


class _Variable(Protocol):
    """The context variable whose value, a dict of lists, the hooks append to; None: nothing is collected."""

    def get(self) -> dict[str, Any] | None: ...

    def set(self, value: dict[str, Any] | None) -> Any: ...

    def reset(self, token: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class WantedOutputs:
    """What a part is to collect: for each kind of output, how many were collected before this part.

    `selection`: the hidden states to keep, by index; None keeps all.
    """

    counts: Mapping[str, int]
    selection: frozenset[int] | None

    def fresh(self) -> dict[str, Any]:
        """A collection for one microbatch. Hooks go by the number of what is there already."""
        found: dict[str, Any] = {key: [None] * count for key, count in self.counts.items()}
        return found if self.selection is None else {**found, _SELECTION: set(self.selection)}

    def added(self, found: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """What hooks have added to a fresh collection."""
        return {key: found[key][count:] for key, count in self.counts.items()}


def wanted(modules: Mapping[str, nn.Module]) -> WantedOutputs | None:
    """What the caller collects by hooks inside these modules; None if nothing.

    Raises `RoundPipeError` if this transformers collects in a way that is unknown here.
    """
    if not any(_collects(hook) for _, module in inside(modules) for hook in hooks_of(module)):
        return None
    collection = _variable().get()
    if collection is None:
        return None
    selection = collection.get(_SELECTION)
    counts = {key: len(values) for key, values in collection.items() if key != _SELECTION}
    return WantedOutputs(counts, None if selection is None else frozenset(selection))


def deliver(found: Mapping[str, list[Any]]) -> None:
    """Add what a part has collected, merged to whole batches, to the caller's collection."""
    collection = _variable().get()
    assert collection is not None
    for key, values in found.items():
        collection[key].extend(values)


def collecting(body: Callable[[], Any], asked: WantedOutputs) -> tuple[Any, dict[str, list[Any]]]:
    """Run a layer on its device; return its output and what the hooks in it have collected."""
    collection = asked.fresh()
    with _collected_in(collection):
        output = body()
    return output, asked.added(collection)


@contextmanager
def _collected_in(collection: dict[str, Any]) -> Generator[None]:
    variable = _variable()
    token = variable.set(collection)
    try:
        yield
    finally:
        variable.reset(token)


def _variable() -> _Variable:
    found = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    if found is None:
        raise RoundPipeError(
            "this version of transformers collects outputs (output_hidden_states and others) in a way that is "
            "unknown here; ask for the model's plain output, or leave the layers on the host (skip_modules)"
        )
    return cast(_Variable, found)


def inside(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The submodules of these modules by name, without the modules themselves."""
    for name, module in modules.items():
        yield from ((path, inner) for path, inner in named_modules(module, name) if inner is not module)


def hooked(modules: Mapping[str, nn.Module]) -> str | None:
    """The name of a submodule with a hook that must see whole batches; None if there is none."""
    found = (name for name, module in inside(modules) if any(not _collects(hook) for hook in hooks_of(module)))
    return next(found, None)


def refuse_hooked(modules: Mapping[str, nn.Module]) -> None:
    """Raise `RoundPipeError` if a submodule has a hook of the user's, which would see microbatches."""
    if (name := hooked(modules)) is not None:
        part = next(where for where in modules if name.startswith(f"{where}."))
        raise RoundPipeError(
            f"{name} has a hook that was registered after the model was wrapped; it lies inside {part}, which "
            "runs on the devices, so the hook would see single microbatches without their gradients; register it "
            f"before wrapping the model, or on {part} itself"
        )


def _collects(hook: object) -> bool:
    return getattr(hook, "__module__", None) == _CAPTURING
