"""Results that transformers collects with hooks, such as hidden states and router logits.

A model's forward puts lists into a context variable, and hooks on its submodules append to them. Other threads do
not see the variable, so a row passes the lists on from layer to layer. Only this file uses transformers' names for
this.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# The attribute by which transformers marks models on which it has registered hooks.
HOOKED = "_output_capturing_hooks_installed"


def _collector() -> Any:
    # Imported late, since transformers takes seconds to import.
    from transformers.utils import output_capturing

    return output_capturing._active_collector  # pyright: ignore[reportPrivateUsage] - there is no public way


class Hooks:
    """Registers transformers' hooks on a model when a call first asks for results that they collect.

    It does so no earlier because torch 2.11 cannot compile the hooks. A layer that was compiled before runs
    uncompiled with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        # Whether the model was converted, so that layers may be compiled, and whether hooks were registered after
        # that.
        self.is_converted = False
        self.are_late = False

    def __deepcopy__(self, memo: object) -> Hooks:
        del memo
        return self

    def ensure(self) -> None:
        """Register the hooks, once. Copies of the layers share their tables of hooks with the model."""
        with self._lock:
            if _install(self._model):
                self.are_late = self.is_converted


def _install(model: nn.Module) -> bool:
    if _is_hooked(model):
        return False
    if getattr(model, "_can_record_outputs", None) and not any(map(_is_hooked, model.modules())):
        from transformers.utils import output_capturing

        output_capturing.maybe_install_capturing_hooks(model)  # pyright: ignore[reportArgumentType]
        return True
    # A list, since every child must get its hooks, even after the first True.
    return any(list(map(_install, model.children())))


def _is_hooked(module: nn.Module) -> bool:
    return bool(vars(module).get(HOOKED, False))


def note_hooked(skeleton: nn.Module) -> None:
    """Mark a skeleton as hooked, so that transformers registers no hooks on its stubs."""
    if getattr(skeleton, "_can_record_outputs", None):
        vars(skeleton)[HOOKED] = True


def wanted() -> dict[str, Any]:
    """Return the lists that the running forward collects into, by name; empty if there are none."""
    return dict(_collector().get() or {})


@contextmanager
def capturing(collected: Mapping[str, Any]) -> Generator[dict[str, Any]]:
    """Let hooks append to copies of these lists inside the context."""
    lists = {key: copy.copy(value) for key, value in collected.items()}
    if not lists:
        yield {}
        return
    collector = _collector()
    token = collector.set(lists)
    try:
        yield lists
    finally:
        collector.reset(token)


def added(collected: Mapping[str, Any]) -> dict[str, Any]:
    """Return what layers appended to lists that began with as many entries as the running forward has by now."""
    lists = wanted()
    return {
        key: values[len(lists.get(key, ())) :] if isinstance(values, list) else values
        for key, values in collected.items()
    }


def deliver(collected: Mapping[str, Any]) -> None:
    """Append values that the layers collected to the lists of the running forward."""
    lists = wanted()
    for key, values in collected.items():
        if isinstance(values, list) and key in lists:
            lists[key].extend(values)
