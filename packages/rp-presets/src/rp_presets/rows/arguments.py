"""Arguments of a model's forward: which are refused, and which are passed to the end of the row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.caches.before import Before, is_state
from rp_presets.rows.absent import Spec
from rp_presets.rows.layout import RowLayout
from rp_presets.rows.trees import mapped

# Of tokens, in their place; and of images, as towers give them.
_FEATURES = ("inputs_embeds", "encoder_outputs", "mm_encoder_outputs")
CACHES = ("past_key_values", "cache_params")


def names_of(model: nn.Module) -> list[str]:
    """Return the names of the parameters of the model's forward.

    >>> names_of(nn.Linear(1, 1))
    ['input']
    """
    forward: Any = type(model).forward  # pyright: ignore[reportUnknownMemberType] - torch leaves its type open
    return [name for name in inspect.signature(forward).parameters if name != "self"]


def use_cache_of(layout: RowLayout) -> dict[str, Any]:
    """Return the argument that keeps the model from creating a key-value cache, if it takes one."""
    return {"use_cache": False} if layout.cache_argument else {}


def with_cache_as_given(
    model: nn.Module, layout: RowLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, changed so that the model uses a cache that is given, and creates none.

    Raises `ValueError` for a cache in a call with gradients, where recomputation would write it again, and for
    anything else in its place.
    """
    names = names_of(model)
    given = dict(zip(names, args, strict=False)) | kwargs
    caches = [name for name in CACHES if given.get(name) is not None]
    for name in caches:
        _check_cache(name, given[name])
    if caches:
        return args, kwargs
    place = names.index("use_cache") if "use_cache" in names else len(args)
    if layout.cache_argument and place < len(args):
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, kwargs | use_cache_of(layout)


def _check_cache(name: str, cache: object) -> None:
    if not is_state(cache):
        raise ValueError(f"{name} must be a cache of transformers, but is a {type(cache).__name__}")
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} must be None in a call with gradients, but is a {type(cache).__name__}: layers write it, and "
            "would write it again when they are recomputed; call the model under torch.no_grad()"
        )


def asks_for_more(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments ask for additional results, such as hidden states.

    The model was not observed with these, so the code after the layers may read anything from before them.
    """
    given = [*zip(names_of(model), args, strict=False), *kwargs.items()]
    return any(name.startswith("output_") and value is True for name, value in given)


def travelling(model: nn.Module, layout: RowLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``(args, kwargs)`` for the code after the layers.

    Large tensors such as embeddings and images, if only read before the layers, are replaced by their shapes.
    Those that the model was not observed with travel, such as positions that are fractions: later code may read
    them. A cache travels with a snapshot from now, before the layers write it.
    """
    is_all = asks_for_more(model, args, kwargs)

    def kept(name: str, value: Any) -> Any:
        origin = (-1, name, 0)
        is_known = origin in layout.observed or name in _FEATURES
        is_read = is_all or "label" in name or origin in layout.needed or not is_known
        return value if is_read else mapped(_shape_if_large, value)

    names = [*names_of(model), *("" for _ in args)]
    positional = tuple(kept(name, value) for name, value in zip(names, args, strict=False))
    return _with_snapshots((positional, {name: kept(name, value) for name, value in kwargs.items()}))


def _shape_if_large(leaf: Any) -> Any:
    is_large = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0
    return Spec.of(leaf) if is_large else leaf


def _with_snapshots(arguments: Any) -> Any:
    """Replace each cache in some arguments by a `Before`. One that is there twice stays one."""
    made: dict[int, Before] = {}
    return _replaced(
        arguments, is_state, lambda state: made.setdefault(id(state), Before(state, Spec.shaped_like))
    )


def snapshots_in(arguments: Any) -> Any:
    """Replace each `Before` by its snapshot, for another run of the code around the layers."""
    return _replaced(arguments, lambda leaf: isinstance(leaf, Before), lambda before: before.snapshot)


def states_in(output: Any, arguments: Any) -> Any:
    """Replace each snapshot in an output by the cache that it was taken of. `arguments`: those that travelled."""
    found: list[Before] = []
    _replaced(arguments, lambda leaf: isinstance(leaf, Before), found.append)
    states = {id(before.snapshot): before.state for before in found}
    if not states:
        return output
    return _replaced(output, lambda leaf: id(leaf) in states, lambda leaf: states[id(leaf)])


def _replaced(tree: Any, is_chosen: Callable[[Any], bool], by: Callable[[Any], Any]) -> Any:
    return mapped(lambda leaf: by(leaf) if is_chosen(leaf) else leaf, tree)
