"""A hook that makes the state dicts of a user's model current: it publishes the results of steps first."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from roundpipe.runtime.runtime import Runtime

_IS_AS_IT_IS: ContextVar[bool] = ContextVar("_IS_AS_IT_IS", default=False)


@contextmanager
def as_it_is() -> Generator[None]:
    """Let state dicts inside the context wait for nothing: for code that needs names, not values."""
    token = _IS_AS_IT_IS.set(True)
    try:
        yield
    finally:
        _IS_AS_IT_IS.reset(token)


class Publisher(Protocol):
    """A wrapped model."""

    name: str
    runtime: Runtime

    def settle(self) -> None:
        """Publish the results of all steps so far, and wait for all who write weights or buffers."""
        ...

    def is_behind(self) -> bool:
        """Whether the model's parameters lack the result of a step."""
        ...


class PublishFirst:
    """A pre-hook of ``state_dict``. It does not keep the wrapped model alive, and copies of it do nothing."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = weakref.ref(publisher)

    def __call__(self, *_: object) -> None:
        publisher = self._publisher()
        if publisher is None or _IS_AS_IT_IS.get():
            return
        if not publisher.runtime.closed:
            publisher.settle()
        elif publisher.is_behind():
            warnings.warn(
                f"the runtime of model {publisher.name!r} was closed before the last step was published, so this "
                "state dict lags behind the optimizer's parameters; call synchronize() before closing it",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    """What a copy of the hook is."""

    def __call__(self, *_: object) -> None: ...


def publish_first(module: nn.Module, publisher: Publisher) -> None:
    """Let state dicts of this module begin with the publication of what the steps of `publisher` have left."""
    module.register_state_dict_pre_hook(PublishFirst(publisher))  # pyright: ignore[reportUnknownMemberType]
