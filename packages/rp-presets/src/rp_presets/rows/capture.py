"""Results that transformers collects by hooks, such as hidden states and router logits.

A model's forward sets a context variable, to which hooks on its submodules append. Other threads do not see it, so
a row hands the lists on from layer to layer. Only this file knows transformers' names for that.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# Transformers marks so the models on which it has registered hooks.
HOOKED = "_output_capturing_hooks_installed"


def _collector() -> Any:
    # Import late: transformers takes seconds.
    from transformers.utils import output_capturing

    return output_capturing._active_collector  # pyright: ignore[reportPrivateUsage] - there is no public way


class Hooks:
    """Registers transformers' hooks on a model, when a call first asks for what they collect.

    Not before: torch 2.11 cannot compile them. A layer that was compiled without them runs uncompiled with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        # Whether layers may have been compiled, and whether hooks were registered after that.
        self.is_converted = False
        self.are_late = False

    def __deepcopy__(self, memo: object) -> Hooks:
        del memo
        return self

    def ensure(self) -> None:
        """Register the hooks unless they are. Copies of the layers share the hooks' tables with the model."""
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
    # A list: each child is to have its hooks.
    return any(list(map(_install, model.children())))


def _is_hooked(module: nn.Module) -> bool:
    return bool(vars(module).get(HOOKED, False))


def note_hooked(skeleton: nn.Module) -> None:
    """Keep transformers from registering hooks on a skeleton's stubs."""
    if getattr(skeleton, "_can_record_outputs", None):
        vars(skeleton)[HOOKED] = True


def wanted() -> dict[str, Any]:
    """The lists that the running forward wants filled, by name; empty if none."""
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


def deliver(collected: Mapping[str, Any]) -> None:
    """Append what the layers collected to the lists of the running forward."""
    lists = wanted()
    for key, values in collected.items():
        if isinstance(values, list) and key in lists:
            lists[key].extend(values)
