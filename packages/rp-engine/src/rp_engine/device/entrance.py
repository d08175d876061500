"""Entrances: a replacement of a module's `forward` that runs on the devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any, NoReturn

import torch

from rp_engine.errors import RoundPipeError


class Entrance:
    """Takes the place of a module's `forward`: calling the module on the host calls `run` instead.

    The module keeps its place, its name, its class and its hooks, which run on the host around `run`. Copies of
    the module, among them its twins on devices, have their own forward again. `owner`: the model that `run`
    belongs to.

    >>> layer = torch.nn.Linear(1, 1)
    >>> entrance = Entrance(layer, lambda x: x + 1, owner=None)
    >>> layer(torch.ones(1))
    tensor([2.])
    >>> entrance.remove()
    >>> entrance_of(layer) is None
    True
    """

    def __init__(self, module: torch.nn.Module, run: Callable[..., Any], owner: object) -> None:
        self.owner = owner
        self._module = module
        self._run = run
        # A forward that was set on the module itself, as by accelerate; usually there is none, the class has it.
        self._before: dict[str, Any] = {name: one for name, one in vars(module).items() if name == "forward"}
        update_wrapper(self, module.forward)
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the devices."""
        return self._run(*args, **kwargs)

    def remove(self) -> None:
        """Give the module its own forward back."""
        del vars(self._module)["forward"]
        vars(self._module).update(self._before)

    @property
    def replaces_own(self) -> bool:
        """Whether the module had the forward of its class before."""
        return not self._before

    @property
    def __globals__(self) -> NoReturn:
        # What torch.jit.script reads first of a forward. Others get along without.
        if sys._getframe(1).f_globals["__name__"] != "torch._jit_internal":  # pyright: ignore[reportPrivateUsage]
            raise AttributeError("an Entrance has no __globals__")
        raise RoundPipeError(
            "a module that a RoundPipe model runs on its devices cannot be compiled by torch.jit.script; script "
            "the model before wrapping it, or wrap it with compile_layers=True"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module, self._before)


def entrance_of(module: torch.nn.Module) -> Entrance | None:
    """Return the entrance that is this module's forward, or None."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Entrance) else None


def _own_forward(module: torch.nn.Module, before: dict[str, Any]) -> Callable[..., Any]:
    return before["forward"] if before else MethodType(type(module).forward, module)
