"""What the code that runs now is doing: an optimizer step, a layer's first forward, or its recomputation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

import rp_batch
import torch

from roundpipe.errors import RoundPipeError

_Data: TypeAlias = tuple[Any, ...]


class _Flags(threading.local):
    optimizer_depth = 0
    layer: LayerCtx | None = None


_FLAGS = _Flags()


class OptimizerCtx:
    """Within it, ``model.parameters()`` gives the optimizer's parameters.

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
    """Whether the calling thread is inside an `OptimizerCtx`, as it is in a step function."""
    return _FLAGS.optimizer_depth > 0


class LayerCtx:
    """Within it the calling thread runs one layer; the inner one counts."""

    def __enter__(self) -> LayerCtx:
        self._outer = _FLAGS.layer
        _FLAGS.layer = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _FLAGS.layer = self._outer


class ForwardCtx(LayerCtx):
    """A layer's first run. `keep` takes what the layer saves; None where it will never be recomputed."""

    def __init__(self, keep: Callable[[_Data], None] | None) -> None:
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
        if self._keep is not None:
            self._keep(data)


class RecomputeCtx(LayerCtx):
    """A layer's recomputation, with what its first run saved."""

    def __init__(self, data: _Data) -> None:
        self.data = data


def _refuse_grads(data: _Data) -> None:
    for path, leaf in zip(rp_batch.paths(data), rp_batch.flatten(data)[0], strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ValueError(
                f"save_for_recompute keeps no gradients, but data{path} requires grad; save it detached, and "
                "compute again what gradients flow through"
            )


def save_for_recompute(*data: Any) -> None:
    """Keep what a layer has found out in its first forward, for when this forward is recomputed.

    Call it at most once in a layer's ``forward``, with any trees: their tensors are copied to the host at once and
    come back, on the device that recomputes the layer, from `get_recompute_data`. Where the layer will not be
    recomputed (without gradients, or where forward and backward run in one go) nothing is kept, and what is saved
    during a recomputation is not looked at.

    A recomputation draws the numbers that the first forward drew, from the first on: what is saved instead of
    drawn again must be drawn last.

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
    layer = _FLAGS.layer
    if layer is None:
        raise RoundPipeError(
            "save_for_recompute was called outside a layer's forward; call it in the forward of a RoundPipe layer"
        )
    if isinstance(layer, ForwardCtx):
        layer.save(data)


def get_recompute_data() -> tuple[Any, ...]:
    """What this layer saved for this microbatch; always a tuple, empty if it saved nothing.

    Tensors are on the layer's device, and the layer's own.

    Raises `RoundPipeError` unless a layer is being recomputed: ask `doing_recompute` first.
    """
    layer = _FLAGS.layer
    if not isinstance(layer, RecomputeCtx):
        raise RoundPipeError(
            "get_recompute_data was called while no layer is recomputed; ask doing_recompute() first"
        )
    return layer.data


def doing_recompute() -> bool:
    """Whether the calling thread recomputes a layer for its backward.

    >>> doing_recompute()
    False
    """
    return isinstance(_FLAGS.layer, RecomputeCtx)
