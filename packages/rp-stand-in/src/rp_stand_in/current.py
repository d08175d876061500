"""State dicts and copies of a user's model are current: results of steps are published first, or put in."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from rp_engine import Runtime
from rp_engine.errors import AloneOnly
from rp_errors import warn_user
from torch import nn

from rp_stand_in.copies import copy_after

_IS_AS_IT_IS: ContextVar[bool] = ContextVar("_IS_AS_IT_IS", default=False)


@contextmanager
def as_it_is() -> Generator[None]:
    """Let state dicts inside the context wait for nothing: for code that needs names, not values."""
    token = _IS_AS_IT_IS.set(True)
    try:
        yield
    finally:
        _IS_AS_IT_IS.reset(token)


def is_as_it_is() -> bool:
    """Return whether the code is inside `as_it_is`."""
    return _IS_AS_IT_IS.get()


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

    def results_apart(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """The results that they lack still after `settle`, by parameter: on several machines."""
        ...


class PublishFirst:
    """A pre-hook of ``state_dict``. It does not keep the wrapped model alive, and copies of it do nothing."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = weakref.ref(publisher)

    def __call__(self, *_: object) -> None:
        publisher = self._publisher()
        if publisher is None or is_as_it_is():
            return
        if not publisher.runtime.closed:
            publisher.settle()
        elif publisher.is_behind():
            warn_user(
                f"the runtime of model {publisher.name!r} was closed before the last step was published, so this "
                "copy lags behind the optimizer's parameters; call synchronize() before closing it",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHook, ()


class PublishBeforeCopies(PublishFirst):
    """What is called before parameters are copied. The engine's own threads copy them as they are."""

    def __call__(self, *_: object) -> None:
        publisher = self._publisher()
        if publisher is None or not (publisher.runtime.closed or publisher.runtime.may_wait()):
            return
        super().__call__()
        if not publisher.runtime.closed and not publisher.runtime.peers.is_alone and publisher.is_behind():
            raise AloneOnly(
                f"a copy of parameters of model {publisher.name!r} would lack the last step's result; call "
                "synchronize() on all machines first, or copy state_dict()"
            )


class Replace:
    """A post-hook of ``state_dict``: puts in results that the model's parameters lack. Copies of it do nothing."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = weakref.ref(publisher)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        publisher = self._publisher()
        if publisher is None or publisher.runtime.closed or is_as_it_is():
            return
        results = publisher.results_apart()
        for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            if parameter in results and name in state:
                _refuse_itself(name, state[name], parameter)
                state[name] = results[parameter].detach()

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHook, ()


def _refuse_itself(name: str, value: object, parameter: nn.Parameter) -> None:
    if value is parameter:
        raise AloneOnly(
            f"state_dict(keep_vars=True) would have {name} itself, which lacks the last step's result; call "
            "synchronize() on all machines first"
        )


class CopiedHook:
    """What a copy of a hook is."""

    def __call__(self, *_: object, **__: object) -> None: ...


def publish_first(module: nn.Module, publisher: Publisher) -> None:
    """Let state dicts and copies of this module begin with publishing what the steps of `publisher` have left."""
    copy_after(module.parameters(), PublishBeforeCopies(publisher))
    module.register_state_dict_pre_hook(PublishFirst(publisher))  # pyright: ignore[reportUnknownMemberType]
    if not publisher.runtime.peers.is_alone:
        module.register_state_dict_post_hook(Replace(publisher))  # pyright: ignore[reportUnknownMemberType]
