"""Forward-mode differentiation inside layers: torch has one level for the whole process, so threads take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch._functorch.eager_transforms as transforms
from torch.autograd import forward_ad


class _Levels:
    """Lets one thread at a time be inside of forward-mode levels, as deep as it likes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._here = threading.local()
        self.is_installed = False

    @property
    def depth(self) -> int:
        """How many levels the current thread is inside of."""
        return getattr(self._here, "depth", 0)

    def entering(self, enter: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a function of torch's that enters a level."""

        def entered() -> Any:
            self._lock.acquire()
            try:
                level = enter()
            except BaseException:
                self._lock.release()
                raise
            self._here.depth = self.depth + 1
            return level

        return entered

    def leaving(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of torch's that leaves a level."""

        def left(*args: Any, **kwargs: Any) -> Any:
            # A level that was entered before this was installed has no lock.
            is_ours = self.depth > 0
            try:
                return leave(*args, **kwargs)
            finally:
                if is_ours:
                    self._here.depth -= 1
                    self._lock.release()

        return left


_LEVELS = _Levels()
_INSTALLING = threading.Lock()


def take_turns_in_levels() -> None:
    """Let one thread at a time use forward-mode levels (``torch.func.jvp``, ``forward_ad.dual_level``).

    Torch numbers them for the whole process: of two layers that use one on two devices, the first to finish would
    end the other's ("no level exists").
    """
    with _INSTALLING:
        if _LEVELS.is_installed:
            return
        torch_has: tuple[Any, Any] = (forward_ad, transforms)
        for module, enter, leave in zip(
            torch_has,
            ("enter_dual_level", "enter_jvp_nesting"),
            ("exit_dual_level", "exit_jvp_nesting"),
            strict=True,
        ):
            setattr(module, enter, _LEVELS.entering(getattr(module, enter)))
            setattr(module, leave, _LEVELS.leaving(getattr(module, leave)))
        _LEVELS.is_installed = True


def is_in_level() -> bool:
    """Return whether the current thread is inside of a forward-mode level.

    >>> take_turns_in_levels()
    >>> with forward_ad.dual_level():
    ...     is_in_level()
    True
    >>> is_in_level()
    False
    """
    return _LEVELS.depth > 0
