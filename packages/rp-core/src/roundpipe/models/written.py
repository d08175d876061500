"""Refuse a submodule that writes into a container it is handed, since each of its microbatches would."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from typing import Any

from rp_engine.errors import RoundPipeError


@contextmanager
def unwritten(name: str, arguments: object) -> Generator[None]:
    """Raise `RoundPipeError` if what runs here changes a dict or list in the arguments of the submodule `name`.

    A container that others see has one state, but there are as many microbatches as it has writers; and a copy,
    which each microbatch has of a plain dict, takes what is written to nobody. Tensors are not looked at.

    >>> with unwritten("layers.0", ({"keys": 1},)):
    ...     pass
    """
    before = [(container, _content(container)) for container in _containers(arguments, set())]
    yield
    for container, content in before:
        if not _same(content, _content(container)):
            raise RoundPipeError(
                f"{name} writes into a {type(container).__name__} that it is handed, which its microbatches "
                "cannot share; wrap the model as a row of layers (use_sequential_preset) if it is one, or leave "
                "this module on the host (skip_modules)"
            )


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """All mutable containers in a tree of containers."""
    if id(value) in seen or not _is_container(value):
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield value
    for item in _values(value):
        yield from _containers(item, seen)


def _is_container(value: object) -> bool:
    return isinstance(value, Mapping | tuple | MutableSequence)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if hasattr(container, "values") else container


def _content(container: Any) -> list[Any]:
    keys: Iterable[Any] = container.keys() if hasattr(container, "keys") else ()
    return [*keys, *_values(container)]


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))
