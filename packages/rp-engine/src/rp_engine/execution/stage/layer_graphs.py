"""Consecutive layers of a task that were captured as graphs: a node of autograd whose passes are replays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import rp_batch
import torch
from rp_transfer import Capture, Device, Graph, GraphPool, NotCapturable

from rp_engine.device.activations import enter

# Runs a layer on a tree; returns its output.
LayerBody = Callable[[int, Any], Any]
# Measures a backward pass that is replayed inside of it.
Timed = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class CaptureWork:
    """What is captured of some layers.

    `run`: runs one layer. `drawing`: its layers that draw random numbers on the device, each a place to draw at.
    `trains`: whether backward follows; else each layer's graph of autograd is dropped, as in a forward task.
    `adding`: a context in which backward adds gradients to sums.
    """

    layers: range
    run: LayerBody
    drawing: tuple[int, ...]
    trains: bool
    adding: Callable[[], AbstractContextManager[object]]


class Passed(NamedTuple):
    """A result that is an input itself, a tensor or an object: the number of that leaf."""

    leaf: int


class Made(NamedTuple):
    """A result that the layers make: its number among these, and whether it requires grad."""

    number: int
    requires_grad: bool


class LayerGraphs:
    """Replays of some layers, for inputs of one signature.

    Inputs are copied to where the graphs read them, and results from where the graphs leave them. Raises
    `NotCapturable` where the layers cannot be captured, and `torch.OutOfMemoryError`.
    """

    def __init__(
        self, device: Device, pool: GraphPool, work: CaptureWork, leaves: Sequence[Any], treedef: Any
    ) -> None:
        self.layers, self.drawing, self.trains = work.layers, work.drawing, work.trains
        self._treedef = treedef
        self._grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        self._leaves = [_held(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._held = tensors_of(self._leaves)
        # What a replay returns requires grad, as weights do, also if none of its inputs does.
        self._anchor = torch.zeros((), device=device.torch_device, requires_grad=work.trains)
        self._gradients: list[torch.Tensor] = []
        self._input_gradients: list[torch.Tensor | None] = []
        self._graphs: list[Graph] = []
        try:
            self._capture(device, pool, work)
        except BaseException:
            self.close()
            raise

    def _capture(self, device: Device, pool: GraphPool, work: CaptureWork) -> None:
        # The work is not kept: it belongs to one task of a call.
        seen, forward = device.capture(partial(self._forward, work), pool=pool, num_draws=len(self.drawing))
        self._graphs.append(forward)
        self._results, self._out_of = seen.results, seen.treedef
        self._made = [one.detach() for one in seen.made]
        self.is_end = [self.trains and one.requires_grad for one in seen.made]
        ends = [one for one, is_end in zip(seen.made, self.is_end, strict=True) if is_end]
        if ends:
            self._gradients = [torch.zeros_like(end) for end in ends]
            self._input_gradients, backward = device.capture(
                lambda _: self._backward(work, ends, seen.grad_leaves), pool=pool
            )
            self._graphs.append(backward)

    def _forward(self, work: CaptureWork, capture: Capture) -> _Seen:
        # As what arrives at a stage, which a layer may write.
        inside, grad_leaves = enter(self._leaves, self._grads)
        tree = rp_batch.unflatten(self._treedef, inside)
        places = self.drawing
        for layer in self.layers:
            with capture.drawing(places.index(layer)) if layer in places else nullcontext():
                tree = work.run(layer, tree)
            if not self.trains and layer + 1 < self.layers.stop:
                tree = _without_graph(tree)
        return _seen(tree, inside, grad_leaves, trains=self.trains)

    def _backward(
        self, work: CaptureWork, ends: Sequence[torch.Tensor], grad_leaves: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        with work.adding():
            torch.autograd.backward(ends, self._gradients)
        pairs = zip(self._leaves, grad_leaves, strict=True)
        return [None if own is None else own.grad for leaf, own in pairs if isinstance(leaf, torch.Tensor)]

    def replay(self, leaves: Sequence[Any], seeds: Sequence[int], timed: Timed = nullcontext) -> Any:
        """Run the layers on the leaves of a tree; return what the last one returns, with a graph if it trains."""
        made = cast(
            "tuple[torch.Tensor, ...]", _Replay.apply(self, tuple(seeds), timed, self._anchor, *tensors_of(leaves))
        )

        def value(result: Any) -> Any:
            match result:
                case Passed(leaf):
                    return leaves[leaf]
                case Made(number, requires_grad):
                    one = made[number]
                    return one.detach().requires_grad_() if requires_grad and not self.trains else one
                case _:
                    return result

        return rp_batch.unflatten(self._out_of, list(map(value, self._results)))

    def run_forward(self, tensors: Iterable[torch.Tensor], seeds: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Replay the forward; return copies of what it makes."""
        for target, source in zip(self._held, tensors, strict=True):
            target.detach().copy_(source)
        self._graphs[0].replay(seeds)
        return tuple(made.clone() for made in self._made)

    def run_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward: gradients are added to the sums; return copies of those of the inputs."""
        of_ends = [grad for grad, is_end in zip(grads, self.is_end, strict=True) if is_end]
        for target, source in zip(self._gradients, of_ends, strict=True):
            # There is one such result, so autograd comes here with its gradient alone.
            assert source is not None
            target.copy_(source)
        self._graphs[1].replay()
        return [None if grad is None else grad.clone() for grad in self._input_gradients]

    def close(self) -> None:
        """Free the graphs."""
        for graph in self._graphs:
            graph.close()


class _Replay(torch.autograd.Function):
    """The forward and the backward of layers' graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: LayerGraphs,
        seeds: tuple[int, ...],
        timed: Timed,
        anchor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.graphs, ctx.timed = graphs, timed
        ctx.set_materialize_grads(False)
        made = graphs.run_forward(tensors, seeds)
        ctx.mark_non_differentiable(*(one for one, is_end in zip(made, graphs.is_end, strict=True) if not is_end))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with ctx.timed():
            return None, None, None, None, *ctx.graphs.run_backward(grads)


def tensors_of(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among some leaves."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _held(leaf: torch.Tensor) -> torch.Tensor:
    """Memory of its own for an input, laid out as the input is, with its values: a layer may index by them."""
    if any(size > 1 and not stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
        raise NotCapturable("elements of their inputs share memory, such as of an expanded tensor")
    memory = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return memory.copy_(leaf.detach())


def _without_graph(tree: Any) -> Any:
    leaves, treedef = rp_batch.flatten(tree)
    grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    return rp_batch.unflatten(treedef, enter(leaves, grads)[0])


class _Seen(NamedTuple):
    """What the last layer returned while it was captured: its leaves as `Passed`, `Made` or values."""

    results: list[Any]
    treedef: Any
    made: list[torch.Tensor]
    grad_leaves: list[torch.Tensor | None]


def _seen(tree: Any, inside: Sequence[Any], grad_leaves: list[torch.Tensor | None], *, trains: bool) -> _Seen:
    leaves, treedef = rp_batch.flatten(tree)
    # Objects, too: a replay hands on that of its own microbatch, which is equal to this only where layers read it.
    given = {id(leaf): number for number, leaf in enumerate(inside)}
    made = [leaf for leaf in tensors_of(leaves) if id(leaf) not in given]
    numbers = {id(leaf): number for number, leaf in enumerate(made)}
    if len(numbers) < len(made) or _share_memory([*made, *tensors_of(inside)]):
        raise NotCapturable("tensors that it returns share memory")
    if trains and sum(leaf.requires_grad for leaf in made) > 1:
        raise NotCapturable("several of the tensors that it returns require gradients")
    results = [
        Passed(given[id(leaf)])
        if id(leaf) in given
        else Made(numbers[id(leaf)], leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return _Seen(results, treedef, made, grad_leaves)


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)
