"""The settings of one call, read by all its tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rp_recompute.randomness import Randomness
from rp_recompute.widening import Widening
from rp_sched import Mode, Task
from rp_state.block import Block
from rp_state.model_state import ModelState
from rp_state.modules.habits import Habits

from rp_engine.context import stepping_in_backward
from rp_engine.device.memory.fp8_twins import Fp8Products
from rp_engine.device.memory.graph_store import GraphWork
from rp_engine.device.memory.weight_cache import NO_WEIGHT_CACHE, WeightCache
from rp_engine.device.packet import Packet
from rp_engine.execution.losses import LossesSeen
from rp_engine.settings.run_config import Grain

_NUMBERS = itertools.count()
LossFn = Callable[[Any, Any], torch.Tensor | Sequence[torch.Tensor]]
# From what the last layer is given and what it returns.
View = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Autocast:
    """The caller's autocast settings for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def current(cls, device_types: Iterable[str]) -> tuple[Autocast, ...]:
        """The calling thread's settings for the host and for these types of devices."""
        return tuple(
            cls(
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys(("cpu", *device_types))
        )


@dataclass(frozen=True, slots=True)
class Streams:
    """The CUDA streams on which a caller's tensors were computed; reading on them needs no further wait."""

    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def current(cls, leaves: Iterable[Any]) -> Streams:
        """The calling thread's current stream on each device that holds one of the tensors among these."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
        return cls(tuple(map(torch.cuda.current_stream, devices)))

    @contextmanager
    def current_here(self) -> Generator[None]:
        """Make them this thread's current streams inside the context."""
        with ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


@dataclass(frozen=True, slots=True)
class Recomputed:
    """How far a recomputation is from its forward: `packet` has the norms of the difference and of the output.

    `least`: the relative difference that counts.
    """

    layer: int
    microbatch: int
    least: float
    packet: Packet


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Whether a layer has written what it must not: `packet` has a number for each of `words`, 0 for no."""

    layer: int
    words: Sequence[str]
    packet: Packet


@dataclass(frozen=True, slots=True)
class Aside:
    """How a call from which no plan learns differs from a user's: one that only shows what a model computes, say.

    By default in nothing: see `USUAL`.

    `view`: makes of what the last layer is given and returns, on its device, what leaves that instead; None: the
    output leaves it.
    `holds_state`: its arguments hold state that layers write, such as a key-value cache, whose tensors stay on the
    devices: it runs there as one microbatch, and no layer runs twice. `stays`: its output stays, too. `kept`: for
    each device, the weights that stay there from call to call; empty: none do. `widening`: makes layers compute in
    more bits; None: they compute as they do.
    """

    view: View | None = None
    widening: Widening | None = None
    holds_state: bool = False
    kept: tuple[WeightCache, ...] = ()
    stays: bool = False


# A call of the user's, from which plans learn.
USUAL = Aside()


@dataclass(frozen=True, slots=True)
class Call:
    """One training or inference call.

    `flags`: the `training` flags of each layer's modules at launch. `randomness`: None if the call does not seed
    random numbers. `spare_bytes`: the memory left free on each device while the call runs. `waits`: whether the
    caller waits until the results are on the host. `first_microbatch`: the number of this machine's first one.
    `habits`: what layers were seen to do when the call was launched. `looks`: whether it shows if anything draws
    in evaluation mode, and has a seed that is drawn only if so. `compares`: whether what layers recompute is
    compared with what forward gave, and weights with what they were: `recomputed` and `rewritten` tell when the
    call is over. `manner`: `USUAL` for a call of the user's. `by_graphs`: whether graphs launch layers where they
    can; `graph_work`: what they did; `frees_graphs`: no later call is to have any; `taken_bytes`: what a
    microbatch takes in some layers on a device beside weights, with what these keep. `products`: which linear
    layers multiply in FP8.
    `coded`: the blocks that travel with codes in place of some weights.
    `ahead`: for each device, the weights that have travelled there before the call. `number`: no other call of
    the process has it.
    """

    name: str
    mode: Mode
    state: ModelState
    flags: tuple[tuple[bool, ...], ...]
    with_grad: bool
    grain: Grain
    is_planned: bool
    num_microbatches: int
    randomness: Randomness | None
    autocast: tuple[Autocast, ...]
    spare_bytes: int = 0
    loss_fn: LossFn | None = None
    keep_outputs: bool = False
    waits: bool = True
    first_microbatch: int = 0
    habits: Habits = field(default_factory=Habits)
    looks: bool = False
    compares: bool = False
    manner: Aside = USUAL
    by_graphs: bool = False
    frees_graphs: bool = False
    taken_bytes: Callable[[range], int] = lambda _: 0
    graph_work: GraphWork = field(default_factory=GraphWork)
    products: Fp8Products | None = None
    coded: frozenset[Block] = frozenset()
    ahead: tuple[WeightCache, ...] = ()
    recomputed: list[Recomputed] = field(default_factory=list[Recomputed])
    rewritten: list[Rewritten] = field(default_factory=list[Rewritten])
    losses_seen: LossesSeen = field(default_factory=LossesSeen)
    number: int = field(default_factory=_NUMBERS.__next__)

    @property
    def holds_state(self) -> bool:
        """See `Aside`."""
        return self.manner.holds_state

    @property
    def widening(self) -> Widening | None:
        """See `Aside`."""
        return self.manner.widening

    def kept(self, device: int) -> WeightCache:
        """Return the weights that a device has before the call."""
        found = self.manner.kept or self.ahead
        return found[device] if found else NO_WEIGHT_CACHE

    @property
    def output_stays(self) -> bool:
        """Whether its output stays on the device."""
        return self.manner.stays

    @property
    def has_loss(self) -> bool:
        """Whether it computes a loss, after which backward may follow in the same run."""
        return self.loss_fn is not None

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.state.layers)

    @property
    def by_layer(self) -> bool:
        """Whether backward tasks recompute one layer at a time."""
        return self.grain == "layer"

    @property
    def is_divided(self) -> bool:
        """Whether its microbatches are a share of those that several machines divide."""
        return self.state.shards.is_divided and (self.mode != "infer" or self.has_loss)

    def computes_loss(self, task: Task) -> bool:
        """Whether a task of this call computes the loss: the one that runs the last layer, if there is a loss.

        Without gradients that is a forward task, which passes no outputs on unless the caller wants them.
        """
        return self.has_loss and task.runs_forward and task.layers.stop == self.num_layers

    @contextmanager
    def ambience(self) -> Generator[None]:
        """Apply the caller's grad mode and autocast settings to a worker thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.with_grad))
            for setting in self.autocast:
                if setting.enabled:
                    stack.enter_context(
                        torch.autocast(setting.device_type, setting.dtype, cache_enabled=setting.cache)
                    )
            if self.state.options.steps_in_backward and self.mode == "fused":
                stack.enter_context(stepping_in_backward())
            yield

    @contextmanager
    def without_autocast(self) -> Generator[None]:
        """Turn autocast off, for backward, as PyTorch advises: forward has chosen the dtypes already."""
        with ExitStack() as stack:
            for setting in self.autocast:
                if setting.enabled:
                    stack.enter_context(torch.autocast(setting.device_type, enabled=False))
            yield

    @contextmanager
    def uncached_autocast(self) -> Generator[None]:
        """Keep autocast's casts of weights for nobody else, and take none that were made before."""
        with ExitStack() as stack:
            for setting in self.autocast:
                if setting.enabled:
                    stack.enter_context(torch.autocast(setting.device_type, setting.dtype, cache_enabled=False))
            yield

    def where(self, layer: int) -> str:
        """Name a layer in words: its index and type."""
        return str(self.state.layers[layer])
