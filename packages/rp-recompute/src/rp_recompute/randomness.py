"""Random numbers that do not depend on the devices: one seed for each call, layer and microbatch.

The device's generator is seeded before each layer. The CPU generator is shared by the whole process, so a layer
that draws from it runs under an exclusive lock. Comparing the generator's state before and after a layer shows
whether it draws. A layer that reads the state, as torch's checkpoint does, may set it again in backward, which
therefore holds the lock, too. The generators of Python and NumPy belong to the process as well: a layer that was
seen to draw from them has them seeded, under the same lock.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, assert_never

import torch
from rp_errors import Busy

from rp_recompute.generators import ProcessGenerator, WatchedGenerators, seeded, sources

_Result = TypeVar("_Result")
_MASK = (1 << 64) - 1
_FREE = nullcontext()
# Whether the lock on the CPU generator is held here, also for calls that are made from here.
_HELD: ContextVar[bool] = ContextVar("roundpipe_generator_held", default=False)


def draw_seed() -> int:
    """Draw a call's seed from the caller's CPU generator.

    Raises `Busy` where a layer or loss function of another model runs: the call would wait for it forever.
    """
    if _HELD.get():
        raise Busy(
            "a model that trains was called from inside a layer, loss function or hook of another one, which uses "
            "the process's random generator meanwhile; call it before, or after model.eval() under torch.no_grad()"
        )
    return int(torch.randint(1 << 62, (), device="cpu").item())


def peek_seed() -> int:
    """Return what `draw_seed` would draw, and leave the generator as it was."""
    callers = _state()
    try:
        return draw_seed()
    finally:
        _set_state(callers)


def may_draw_seed() -> bool:
    """Return whether `draw_seed` draws here, where no layer or loss function of another model runs."""
    return not _HELD.get()


class RngConsumer(NamedTuple):
    """A consumer of random numbers: a layer, its `prepare`, or the loss function. Each gets its own seed."""

    what: Literal["layer", "prepare", "loss"]
    layer: int = 0

    def place(self, num_layers: int) -> int:
        """Return a number unique in the model: first layers, then the loss function, then layers' `prepare`."""
        match self.what:
            case "layer":
                return self.layer
            case "loss":
                return num_layers
            case "prepare":
                return num_layers + 1 + self.layer
            case _:
                assert_never(self.what)


# What draws, and for which microbatch.
_DrawKey = tuple[RngConsumer, int]


def mix(seed: int, layer: int, microbatch: int) -> int:
    """Return the seed of one layer and microbatch in a call (SplitMix64; Steele, Lea and Flood, 2014)."""
    value = (seed + 0x9E3779B97F4A7C15 * (1 + (layer << 20) + microbatch)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1


class _Gate:
    """A lock on the CPU generator: shared by threads that should not draw, exclusive for one that does."""

    def __init__(self) -> None:
        # Entered in place of its condition: each layer does so twice, and a condition's `with` is Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # How many wait to hold it alone.
        self._waiting = 0
        self._sharers = 0
        self._alone = False
        self._callers = b""
        self._drawn = False

    def share(self) -> bytes:
        """Acquire the shared lock; return the generator's state before any holder ran.

        If a holder may have drawn, the last one to leave restores this state.
        """
        with self._lock:
            if self._alone:
                self._changed.wait_for(lambda: not self._alone)
            if not self._sharers:
                self._callers = _state()
            self._sharers += 1
        _HELD.set(True)
        return self._callers

    def leave(self, *, drawn: bool) -> None:
        """Release the shared lock. `drawn`: the generator may have been drawn from since `share`."""
        _HELD.set(False)
        with self._lock:
            self._sharers -= 1
            self._drawn |= drawn
            if not self._sharers and self._drawn:
                self._drawn = False
                _set_state(self._callers)
            if not self._sharers and self._waiting:
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Generator[None]:
        """Hold the shared lock; if the generator's state has changed on exit, it is restored."""
        callers, drawn = self.share(), True
        try:
            yield
            drawn = _drawn_since(callers)
        finally:
            self.leave(drawn=drawn)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Hold the exclusive lock; restore the generator's state on exit."""
        with self._lock:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._sharers)
            finally:
                self._waiting -= 1
            self._alone = True
        _HELD.set(True)
        callers = _state()
        try:
            yield
        finally:
            _HELD.set(False)
            _set_state(callers)
            with self._lock:
                self._alone = False
                self._changed.notify_all()


def _state() -> bytes:
    # Not as a tensor: it is compared before and after every layer, and torch's comparison would release the GIL.
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_state(state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _drawn_since(state: bytes) -> bool:
    """Return whether numbers were drawn from the CPU generator since it was in this state."""
    return state != _state()


_GATE = _Gate()


class _Uses(threading.local):
    """How often a thread has read and set the CPU generator's state with torch's functions."""

    reads = 0
    sets = 0


_USES = _Uses()


@cache
def _count_uses() -> None:
    """Make torch's functions for the CPU generator's state count their calls in each thread.

    Torch's checkpoint and `fork_rng` leave the state as they found it, so comparing states does not show them.
    """
    read, write = torch.get_rng_state, torch.set_rng_state

    def count_read() -> torch.Tensor:
        _USES.reads += 1
        return read()

    def count_set(new_state: torch.Tensor) -> None:
        _USES.sets += 1
        write(new_state)

    changed = {"get_rng_state": _untraced(count_read, read), "set_rng_state": _untraced(count_set, write)}
    for module in (torch, torch.random):
        vars(module).update(changed)


def _untraced(function: Callable[..., _Result], like: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keep torch's compiler from tracing a function: it would count what was so when it was compiled."""
    disabled: Callable[..., _Result] = torch._disable_dynamo(function)  # pyright: ignore

    @wraps(like)
    def call(*args: Any, **kwargs: Any) -> _Result:
        # The first call of `disabled` would import the compiler, which takes seconds.
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


class Habits(Protocol):
    """What consumers were seen to do, shared by all calls of a model: `rp_state.Habits`, or `NewHabits`.

    `not_drawing`: those that were last seen to draw from none of the process's generators. `sources`: for each
    that was looked at, the generators of Python and NumPy that it draws from. `writers`: those that write their
    input in place, so that they cannot be run twice. `drawing_on_device`: those that drew from a device's.
    """

    not_drawing: set[Any]
    sources: dict[Any, tuple[Any, ...]]
    writers: set[Any]
    drawing_on_device: set[Any]


@dataclass(slots=True)
class NewHabits:
    """`Habits` of which nothing was seen yet."""

    not_drawing: set[Any] = field(default_factory=set[Any])
    sources: dict[Any, tuple[Any, ...]] = field(default_factory=dict[Any, tuple[Any, ...]])
    writers: set[Any] = field(default_factory=set[Any])
    drawing_on_device: set[Any] = field(default_factory=set[Any])


class Randomness:
    """The random numbers of one call, for the microbatches from `first` on. `seed`: the call's, from `draw_seed`.

    `habits`: what consumers were seen to do, shared by all calls of the model. `drew` and `drew_on_device`: the
    consumers and microbatches that drew from the process's generators, or the device's, in this call. `read`:
    those that read the CPU generator's state, to which their backward may set it.
    """

    def __init__(self, seed: int, num_layers: int, habits: Habits, first: int = 0) -> None:
        self.seed = seed
        self._first = first
        self._num_layers = num_layers
        self._habits = habits
        self.drew: set[tuple[RngConsumer, int]] = set()
        self.drew_on_device: set[tuple[RngConsumer, int]] = set()
        self.read: set[tuple[RngConsumer, int]] = set()
        _count_uses()

    def run(
        self,
        generator: torch.Generator,
        consumer: RngConsumer,
        microbatch: int,
        body: Callable[[], _Result],
        *,
        recomputes: bool,
    ) -> _Result:
        """Run a layer's first forward or, with `recomputes`, recompute it; note whether it reads the CPU state."""
        reads = _USES.reads
        result = (self.recompute if recomputes else self.forward)(generator, consumer, microbatch, body)
        if _USES.reads != reads:
            self.read.add((consumer, microbatch))
        return result

    def forward(
        self, generator: torch.Generator, consumer: RngConsumer, microbatch: int, body: Callable[[], _Result]
    ) -> _Result:
        """Run a layer's first forward, seeded.

        If it draws from the CPU generator unexpectedly, it is run again under the exclusive lock.
        """
        place = (consumer, microbatch)
        habits = self._habits
        if consumer in habits.not_drawing:
            result, on_device, drew = self._beside_others(generator, place, body)
            if not drew:
                if on_device:
                    self._note_device_draw(place)
                return result
            del result
            habits.not_drawing.discard(consumer)
        looks = consumer not in habits.sources
        run = self._looked_at if looks else self._alone
        result, on_device, drew = run(generator, place, body)
        if on_device:
            self._note_device_draw(place)
        if drew or habits.sources[consumer]:
            self.drew.add(place)
        elif consumer not in habits.writers:
            # One that writes its input could not be run again.
            habits.not_drawing.add(consumer)
        return result

    def _looked_at(
        self, generator: torch.Generator, place: _DrawKey, body: Callable[[], _Result]
    ) -> tuple[_Result, bool, bool]:
        """Run alone and see which of Python's generators are drawn from. A state takes 20 to 70 µs."""
        everything, seed = sources(), self._mixed(place)
        with _GATE.alone(), seeded(everything, seed):
            look = WatchedGenerators(everything)
            found = self._from_seed(generator, seed, body)
            self._habits.sources[place[0]] = look.drawn()
        return found

    def recompute(
        self, generator: torch.Generator, consumer: RngConsumer, microbatch: int, body: Callable[[], _Result]
    ) -> _Result:
        """Recompute a layer with the random numbers of its first forward."""
        place = (consumer, microbatch)
        if place in self.drew:
            return self._alone(generator, place, body)[0]
        if place not in self.read:
            return self._recompute_beside(generator, place, body)
        with _GATE.shared():
            return self._recompute_beside(generator, place, body)

    def _recompute_beside(
        self, generator: torch.Generator, place: _DrawKey, body: Callable[[], _Result]
    ) -> _Result:
        if place not in self.drew_on_device:
            return body()
        return _seeded(generator, self._mixed(place), body)[0]

    def backward(self, layers: Iterable[int], microbatch: int, *, with_loss: bool) -> AbstractContextManager[None]:
        """Return the lock to hold during backward through these layers, `with_loss` also the loss function.

        Those that read the generator's state may set it to what they read. If they did not draw, that is the
        caller's state: it disturbs only those that draw. If they did, their backward draws the same numbers again.
        """
        if not self.read:
            return _FREE
        consumers = [*(RngConsumer("layer", layer) for layer in layers), *[RngConsumer("loss")] * with_loss]
        places = [(consumer, microbatch) for consumer in consumers if (consumer, microbatch) in self.read]
        if not places:
            return _FREE
        return _GATE.shared() if self.drew.isdisjoint(places) else _GATE.alone()

    def _note_device_draw(self, place: _DrawKey) -> None:
        self.drew_on_device.add(place)
        self._habits.drawing_on_device.add(place[0])

    def seed_of(self, consumer: RngConsumer, microbatch: int) -> int:
        """The seed of a consumer for a microbatch."""
        return self._mixed((consumer, microbatch))

    def _mixed(self, place: _DrawKey) -> int:
        consumer, microbatch = place
        return mix(self.seed, consumer.place(self._num_layers), self._first + microbatch)

    def has_drawn(self) -> bool:
        """Return whether any consumer of the call drew from a generator."""
        return bool(self.drew or self.drew_on_device)

    def uses_generators(self) -> bool:
        """Return whether any layer drew, or read the state, so that it will use a generator again in backward."""
        return self.has_drawn() or bool(self.read)

    def _beside_others(
        self, device: torch.Generator, place: _DrawKey, body: Callable[[], _Result]
    ) -> tuple[_Result, bool, bool]:
        callers, sets, drew = _GATE.share(), _USES.sets, True
        try:
            result, on_device = _seeded(device, self._mixed(place), body)
            drew = _USES.sets != sets or _drawn_since(callers)
            return result, on_device, drew
        finally:
            _GATE.leave(drawn=drew)

    def _alone(
        self, device: torch.Generator, place: _DrawKey, body: Callable[[], _Result]
    ) -> tuple[_Result, bool, bool]:
        chosen: tuple[ProcessGenerator, ...] = self._habits.sources.get(place[0], ())
        seed = self._mixed(place)
        with _GATE.alone(), seeded(chosen, seed):
            return self._from_seed(device, seed, body)

    @staticmethod
    def _from_seed(device: torch.Generator, seed: int, body: Callable[[], _Result]) -> tuple[_Result, bool, bool]:
        torch.default_generator.manual_seed(seed)
        before, sets = _state(), _USES.sets
        result, on_device = _seeded(device, seed, body)
        return result, on_device, _USES.sets != sets or _drawn_since(before)


def unseeded(generator: torch.Generator, body: Callable[[], _Result], seed: int = 0) -> _Result:
    """Run what must not change any generator of the process in a call that does not seed them."""
    return Randomness(seed, 1, NewHabits()).forward(generator, RngConsumer("layer"), 0, body)


def _seeded(generator: torch.Generator, seed: int, body: Callable[[], _Result]) -> tuple[_Result, bool]:
    """Run with a device's generator seeded, then restore its state; also return whether it was drawn from."""
    if generator is torch.default_generator:
        return body(), False
    # A GPU's generator is a seed and an offset, which counts what was drawn. Its state would be a new tensor.
    callers_seed, callers_offset = _seed_and_offset(generator)
    try:
        generator.manual_seed(seed)
        result = body()
        return result, _seed_and_offset(generator) != (seed, 0)
    finally:
        generator.manual_seed(callers_seed).set_offset(callers_offset)


def _seed_and_offset(generator: torch.Generator) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()
