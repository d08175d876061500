"""The global random generators from which layers may draw, Python's and NumPy's: seeded, compared, set back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch


class ProcessGenerator(Protocol):
    """A generator that belongs to the whole process."""

    def state(self) -> Any:
        """Its state, which compares as equal as long as nobody draws."""
        ...

    def seed(self, seed: int) -> None:
        """Start it from a seed: a number below 2 ** 63."""
        ...

    def restore(self, state: Any) -> None:
        """Set it to an earlier state."""
        ...


class _Python:
    """The generator behind the functions of `random`."""

    def state(self) -> Any:
        return random.getstate()

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def restore(self, state: Any) -> None:
        random.setstate(state)


class _NumPy:
    """The generator behind the functions of ``numpy.random``. Only for who has imported NumPy."""

    def state(self) -> Any:
        kind, keys, *rest = _numpy_random().get_state()
        return kind, keys.tobytes(), *rest

    def seed(self, seed: int) -> None:
        _numpy_random().seed([seed & 0xFFFFFFFF, seed >> 32])

    def restore(self, state: Any) -> None:
        kind, keys, *rest = state
        numpy = sys.modules["numpy"]
        _numpy_random().set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _numpy_random() -> Any:
    # Any: NumPy is optional. Its random module may not be loaded yet: a layer's first use of it would load it.
    import numpy

    return numpy.random


_PYTHON, _NUMPY = _Python(), _NumPy()


def sources() -> tuple[ProcessGenerator, ...]:
    """The generators that code of this process can draw from.

    >>> len(sources()) in (1, 2)
    True
    """
    # Another bit generator than NumPy's default could not be seeded by a number: nobody has set one up by chance.
    has_numpy = "numpy" in sys.modules and _numpy_random().get_bit_generator().state["bit_generator"] == "MT19937"
    return (_PYTHON, _NUMPY) if has_numpy else (_PYTHON,)


@contextmanager
def seeded(chosen: Sequence[ProcessGenerator], seed: int) -> Generator[None]:
    """Seed these generators inside the context; set them back at its end.

    >>> before = random.getstate()
    >>> with seeded(sources(), 7):
    ...     number = random.random()
    >>> random.getstate() == before
    True
    """
    with ExitStack() as stack:
        for source in chosen:
            stack.callback(source.restore, source.state())
            source.seed(seed)
        yield


def setting_back(generators: Iterable[torch.Generator]) -> Callable[[], None]:
    """Return a function that sets these generators of torch's, and Python's and NumPy's, to their present states.

    >>> set_back = setting_back([torch.default_generator])
    >>> numbers = [(set_back(), random.random(), torch.rand(())) for _ in range(2)]
    >>> numbers[0] == numbers[1]
    True
    """
    # Virtual devices share torch's generator.
    distinct = dict.fromkeys(generators)
    states: list[Callable[[], object]] = [partial(one.set_state, one.get_state()) for one in distinct]
    states.append(partial(random.setstate, random.getstate()))
    # Any: NumPy need not be there.
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if numpy:
        states.append(partial(numpy.set_state, numpy.get_state()))

    def set_back() -> None:
        for restore in states:
            restore()

    return set_back


class WatchedGenerators:
    """Sees which of the generators are drawn from between its making and `drawn`."""

    def __init__(self, watched: Sequence[ProcessGenerator]) -> None:
        self._before = [(source, source.state()) for source in watched]

    def drawn(self) -> tuple[ProcessGenerator, ...]:
        """The generators whose state has changed."""
        return tuple(source for source, state in self._before if source.state() != state)
