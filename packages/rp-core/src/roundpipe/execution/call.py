"""The settings of one call, read by all its tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import rp_batch
import torch
from rp_sched import Mode

from roundpipe.context import stepping_in_backward
from roundpipe.device.randomness import Randomness
from roundpipe.execution.losses import LossesSeen
from roundpipe.settings.run_config import Grain
from roundpipe.state.model_state import ModelState

LossFn = Callable[[Any, Any], torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Autocast:
    """The caller's autocast settings for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def current(cls) -> tuple[Autocast, ...]:
        """The calling thread's settings for the CPU and CUDA."""
        return tuple(
            cls(
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in ("cpu", "cuda")
        )


@dataclass(frozen=True, slots=True)
class Streams:
    """The CUDA streams on which a caller's tensors were computed; reading on them needs no further wait."""

    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def current(cls, tree: Any) -> Streams:
        """The calling thread's current stream on each device that holds a tensor of the tree."""
        tensors = [leaf for leaf in rp_batch.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
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
class Call:
    """One training or inference call.

    `flags`: the `training` flags of each layer's modules at launch. `randomness`: None if the call does not seed
    random numbers. `spare_bytes`: the memory left free on each device while the call runs. `waits`: whether the
    caller waits until the results are on the host. `first_microbatch`: the number of this machine's first one.
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
    losses_seen: LossesSeen = field(default_factory=LossesSeen)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.state.layers)

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
            if self.state.options.steps_in_backward and self.loss_fn is not None:
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

    def where(self, layer: int) -> str:
        """Name a layer in words: its index and type."""
        return str(self.state.layers[layer])
