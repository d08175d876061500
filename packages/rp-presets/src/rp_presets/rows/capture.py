"""Results that transformers collects by hooks, such as hidden states and router logits.

A model's forward sets a context variable, to which hooks on its submodules append. Other threads do not see it, so
a row hands the lists on from layer to layer. Only this file knows transformers' names for that.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def _collector() -> Any:
    # Import late: transformers takes seconds.
    from transformers.utils import output_capturing

    return output_capturing._active_collector  # pyright: ignore[reportPrivateUsage] - there is no public way


def install_hooks(model: nn.Module) -> None:
    """Let transformers register its hooks now: later it would register them on a skeleton's stubs."""
    if _is_hooked(model):
        return
    if getattr(model, "_can_record_outputs", None) and not any(map(_is_hooked, model.modules())):
        from transformers.utils import output_capturing

        output_capturing.maybe_install_capturing_hooks(model)  # pyright: ignore[reportArgumentType]
        return
    for child in model.children():
        install_hooks(child)


def _is_hooked(module: nn.Module) -> bool:
    return bool(vars(module).get("_output_capturing_hooks_installed", False))


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
