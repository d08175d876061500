"""What an optimizer asks of the place of its state, and state in memory, which is always in reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

State = dict[str, Any]
States = dict[torch.Tensor, State]
# The tensors of a parameter's state: the shape and dtype of each.
Outline = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Outlines = Callable[[], Mapping[torch.Tensor, Outline]]

_Item = TypeVar("_Item")


class StatePlace(Protocol):
    """The place of an optimizer's state. `states`: torch's own dict of states, by parameter.

    `outlines` returns what tensors each parameter's state has, once it has all of them.
    """

    def begin_step(self, states: States, outlines: Outlines) -> None:
        """Make room for the state of all parameters, before a step changes anything."""
        ...

    def parts(
        self, items: Sequence[_Item], parameter_of: Callable[[_Item], torch.Tensor]
    ) -> Iterable[Sequence[_Item]]:
        """Divide what is updated at once into parts that `reach` can take."""
        ...

    def reach(self, states: States, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Have these parameters' state in `states`, to be read and written until the context ends."""
        ...

    def whole(self, states: States) -> AbstractContextManager[States]:
        """Have copies of all state in `states` until the context ends; yield a dict that keeps them."""
        ...

    def deferred(self, states: States) -> AbstractContextManager[States]:
        """Do the same with `Deferred`s for what is not in memory."""
        ...

    def renewed(self, outlines: Outlines) -> AbstractContextManager[None]:
        """Forget all state, torn or not, and have `keep` called for each parameter until the context ends.

        After an error in it, steps are refused, unless the state is in memory.
        """
        ...

    def keep(self, states: States, parameter: torch.Tensor) -> None:
        """Take over this parameter's state, which was loaded into `states`."""
        ...

    def memory_bytes(self, outlines: Outlines) -> int:
        """Return the host memory that all state takes, without counters."""
        ...

    def memory_bytes_now(self) -> int:
        """Return the host memory that is taken now beside the tensors in `states`."""
        ...


class InMemory:
    """State that stays in the optimizer's own dict."""

    def begin_step(self, states: States, outlines: Outlines) -> None:
        """See `StatePlace`."""

    def parts(
        self, items: Sequence[_Item], parameter_of: Callable[[_Item], torch.Tensor]
    ) -> Iterable[Sequence[_Item]]:
        """See `StatePlace`."""
        del parameter_of
        return (items,)

    def reach(self, states: States, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """See `StatePlace`."""
        del states, parameters
        return nullcontext()

    def whole(self, states: States) -> AbstractContextManager[States]:
        """See `StatePlace`."""
        return nullcontext(states)

    deferred = whole

    def renewed(self, outlines: Outlines) -> AbstractContextManager[None]:
        """See `StatePlace`."""
        del outlines
        return nullcontext()

    def keep(self, states: States, parameter: torch.Tensor) -> None:
        """See `StatePlace`."""

    def memory_bytes(self, outlines: Outlines) -> int:
        """See `StatePlace`."""
        return sum(map(bytes_of, outlines().values()))

    def memory_bytes_now(self) -> int:
        """See `StatePlace`."""
        return 0


def bytes_of(outline: Outline) -> int:
    """Return the bytes of a state's tensors."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in outline.values())


IN_MEMORY: StatePlace = InMemory()
