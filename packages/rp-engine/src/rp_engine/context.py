"""Per-thread state: whether a step or loss function, a layer's first forward or its recomputation is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeAlias

import rp_batch
import torch

from rp_engine.errors import RoundPipeError

_Data: TypeAlias = tuple[Any, ...]


class LayerCtx:
    """Marks the calling thread as running one layer. If nested, the innermost context applies."""

    def __enter__(self) -> LayerCtx:
        self._outer = _FLAGS.layer
        _FLAGS.layer = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _FLAGS.layer = self._outer

    def save(self, data: _Data) -> None:
        """Do what `save_for_recompute` does here: nothing, unless it is a layer's first forward."""


class _NoLayer(LayerCtx):
    """Outside of all layers."""

    def save(self, data: _Data) -> None:
        """Refuse it."""
        del data
        raise RoundPipeError(
            "save_for_recompute was called outside a layer's forward; call it in the forward of a RoundPipe layer"
        )


class _Flags(threading.local):
    optimizer_depth = 0
    is_stepping_in_backward = False
    loss_microbatches = 1
    layer: LayerCtx = _NoLayer()


_FLAGS = _Flags()


class OptimizerCtx:
    """Inside it, ``model.parameters()`` returns the optimizer's parameters.

    >>> with OptimizerCtx():
    ...     doing_optimizer()
    True
    """

    def __enter__(self) -> OptimizerCtx:
        _FLAGS.optimizer_depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _FLAGS.optimizer_depth -= 1


def doing_optimizer() -> bool:
    """Return whether the calling thread is inside an `OptimizerCtx`, as it is in a step function."""
    return _FLAGS.optimizer_depth > 0


@contextmanager
def stepping_in_backward() -> Generator[None]:
    """Marks the calling thread as running the loss function of a call in which the optimizer steps.

    >>> with stepping_in_backward():
    ...     is_stepping_in_backward()
    True
    """
    _FLAGS.is_stepping_in_backward = True
    try:
        yield
    finally:
        _FLAGS.is_stepping_in_backward = False


def is_stepping_in_backward() -> bool:
    """Return whether the calling thread is inside `stepping_in_backward`."""
    return _FLAGS.is_stepping_in_backward


@contextmanager
def computing_loss(microbatches: int) -> Generator[None]:
    """Marks the calling thread as running the loss function of one of so many microbatches.

    >>> with computing_loss(4):
    ...     loss_microbatches()
    4
    """
    outer = _FLAGS.loss_microbatches
    _FLAGS.loss_microbatches = microbatches
    try:
        yield
    finally:
        _FLAGS.loss_microbatches = outer


def loss_microbatches() -> int:
    """How many microbatches the batch has whose loss function the calling thread runs; 1 outside of those."""
    return _FLAGS.loss_microbatches


def lasting() -> AbstractContextManager[object]:
    """Leave inference mode inside the context: tensors made there stay usable in training.

    >>> with torch.inference_mode(), lasting():
    ...     torch.ones(1).is_inference()
    False
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class ForwardCtx(LayerCtx):
    """A layer's first forward. `keep` stores the data that the layer saves, if it will be recomputed."""

    def __init__(self, keep: Callable[[_Data], None]) -> None:
        self._keep = keep
        self._has_saved = False

    def save(self, data: _Data) -> None:
        """See `save_for_recompute`."""
        if self._has_saved:
            raise RoundPipeError(
                "save_for_recompute was called twice in one forward of a layer; save everything in one call"
            )
        _refuse_grads(data)
        self._has_saved = True
        self._keep(data)


class RecomputeCtx(LayerCtx):
    """A layer's recomputation, with the data that its first forward saved."""

    def __init__(self, data: _Data) -> None:
        self.data = data


def _refuse_grads(data: _Data) -> None:
    for path, leaf in zip(rp_batch.paths(data), rp_batch.flatten(data)[0], strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ValueError(
                f"save_for_recompute keeps no gradients, but data{path} requires grad; save it detached, and "
                "recompute every tensor that gradients flow through"
            )


def save_for_recompute(*data: Any) -> None:
    """Store data in a layer's first forward, to be read when this forward is recomputed.

    Call it at most once in a layer's ``forward``, with any trees. Their tensors are copied to the host at once.
    `get_recompute_data` returns them on the device that recomputes the layer. Nothing is stored if the layer will
    not be recomputed: without gradients, or where forward and backward run in one task. A call during a
    recomputation is ignored.

    A recomputation draws the same random numbers as the first forward, in the same order. If it skips a draw
    because the result was saved, that draw must be the last one.

    >>> class Routed(torch.nn.Module):
    ...     def forward(self, x):
    ...         if doing_recompute():
    ...             (order,) = get_recompute_data()
    ...         else:
    ...             order = x.detach().argsort(0)
    ...             save_for_recompute(order)
    ...         return x.gather(0, order)

    Raises `RoundPipeError` outside a layer's forward and for a second call in one; `ValueError` for a tensor that
    requires grad.
    """
    _FLAGS.layer.save(data)


def get_recompute_data() -> tuple[Any, ...]:
    """Return what this layer saved for this microbatch: always a tuple, empty if it saved nothing.

    The tensors are copies on the layer's device; the layer may write them.

    Raises `RoundPipeError` unless a layer is being recomputed: check `doing_recompute` first.
    """
    layer = _FLAGS.layer
    if not isinstance(layer, RecomputeCtx):
        raise RoundPipeError(
            "get_recompute_data was called while no layer is being recomputed; check doing_recompute() first"
        )
    return layer.data


def doing_recompute() -> bool:
    """Return whether the calling thread is recomputing a layer for its backward.

    >>> doing_recompute()
    False
    """
    return isinstance(_FLAGS.layer, RecomputeCtx)
