"""Consecutive layers of a task that were captured as graphs: a node of autograd whose passes are replays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from typing import Any, NamedTuple, Protocol, cast

import rp_batch
import torch
from rp_state.block import Block
from rp_transfer import Capture, Device, Graph, GraphPool, NotCapturable

from rp_engine.device.activations import enter

# Runs a layer on a tree; returns its output.
LayerBody = Callable[[int, Any], Any]
# How often each gradient of some blocks is added to.
Additions = Mapping[Block, Sequence[int]]


@dataclass(frozen=True, slots=True)
class CaptureWork:
    """What is captured of some layers.

    `segments`: the layers, divided: each has a graph forward and one backward. `run`: runs one layer. `drawing`:
    its layers that draw random numbers on the device, each a place to draw at. `trains`: whether backward follows;
    else each layer's graph of autograd is dropped, as in a forward task. `adding`: a context in which backward
    adds gradients to sums. `counts`: how often each gradient was added to.
    """

    segments: Sequence[range]
    run: LayerBody
    drawing: frozenset[int]
    trains: bool
    adding: Callable[[], AbstractContextManager[object]]
    counts: Callable[[], Additions]

    @property
    def layers(self) -> range:
        """All of them."""
        return range(self.segments[0].start, self.segments[-1].stop)


class ReplaySteps(Protocol):
    """What happens around the graphs of each segment while all are replayed once."""

    def seeds(self, layers: Sequence[int]) -> list[int]:
        """The seeds of layers that draw random numbers."""
        ...

    def forward(self, layers: range) -> AbstractContextManager[object]:
        """The context of a forward graph. On entry the weights of its layers are to be there."""
        ...

    def backward(self, layers: range, additions: Additions) -> AbstractContextManager[object]:
        """The context of a backward graph, which adds to gradients so often."""
        ...


class Passed(NamedTuple):
    """A result that is an input itself, a tensor or an object: the number of that leaf."""

    leaf: int


class MadeResult(NamedTuple):
    """A result that the layers make: its number among these, and whether it requires grad."""

    number: int
    requires_grad: bool


@dataclass
class _Segment:
    """The graphs of some layers, of which `drawing` draw random numbers. `backward`: None if it adds nothing."""

    layers: range
    drawing: list[int]
    forward: Graph
    backward: Graph | None = None
    additions: Additions = field(default_factory=dict[Block, list[int]])


class LayerGraphs:
    """Replays of some layers, for inputs of one signature.

    Inputs are copied to where the graphs read them, and results from where the graphs leave them; from one segment
    to the next nothing is copied. All graphs share a pool, and are replayed as they were captured: forward, then
    backward from the last segment on. Raises `NotCapturable` where the layers cannot be captured, and
    `torch.OutOfMemoryError`.
    """

    def __init__(
        self, device: Device, pool: GraphPool, work: CaptureWork, leaves: Sequence[Any], treedef: Any
    ) -> None:
        self.layers, self.trains = work.layers, work.trains
        self._treedef = treedef
        self._grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        self._leaves = [_held(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._held = tensors_of(self._leaves)
        # What a replay returns requires grad, as weights do, also if none of its inputs does.
        self._anchor = torch.zeros((), device=device.torch_device, requires_grad=work.trains)
        self._gradients: list[torch.Tensor] = []
        self._input_gradients: list[torch.Tensor | None] = []
        self._segments: list[_Segment] = []
        try:
            self._capture(partial(device.capture, pool=pool), work)
        except BaseException:
            self.close()
            raise

    def _capture(self, capture: _Capturing, work: CaptureWork) -> None:
        # The work is not kept: it belongs to one task of a call.
        # As what arrives at a stage, which a layer may write.
        inside, grad_leaves = enter(self._leaves, self._grads)
        tree, crossings = rp_batch.unflatten(self._treedef, inside), list[_Crossing]()
        for layers in work.segments:
            if self._segments:
                crossings.append(_Crossing(tree, [*inside, *(one for cut in crossings for one in cut.inside)]))
                tree = crossings[-1].tree
            tree = self._capture_forward(capture, work, layers, tree)
        seen = _seen(tree, inside, trains=self.trains)
        self._results, self._out_of = seen.results, seen.treedef
        self._made = [one.detach() for one in seen.made]
        self.is_end = [self.trains and one.requires_grad for one in seen.made]
        ends = [one for one, is_end in zip(seen.made, self.is_end, strict=True) if is_end]
        self._gradients = [torch.zeros_like(end) for end in ends]
        del tree, seen
        self._capture_backward(capture, work, _Ends(ends, self._gradients), crossings)
        pairs = zip(self._leaves, grad_leaves, strict=True)
        self._input_gradients = [
            None if own is None else own.grad for leaf, own in pairs if isinstance(leaf, torch.Tensor)
        ]

    def _capture_forward(self, capture: _Capturing, work: CaptureWork, layers: range, tree: Any) -> Any:
        drawing = [layer for layer in layers if layer in work.drawing]

        def forward(run: Capture) -> Any:
            output = tree
            for layer in layers:
                with run.drawing(drawing.index(layer)) if layer in drawing else nullcontext():
                    output = work.run(layer, output)
                if not self.trains and layer + 1 < work.layers.stop:
                    output = _without_graph(output)
            return output

        output, graph = capture(forward, num_draws=len(drawing))
        self._segments.append(_Segment(layers, drawing, graph))
        return output

    def _capture_backward(
        self, capture: _Capturing, work: CaptureWork, ends: _Ends, crossings: list[_Crossing]
    ) -> None:
        def backward(_: Capture) -> None:
            with work.adding():
                torch.autograd.backward(*ends)

        for segment in reversed(self._segments):
            if ends.tensors:
                before = work.counts()
                _, segment.backward = capture(backward)
                segment.additions = _difference(before, work.counts())
            if crossings:
                ends = crossings.pop().ends()

    def replay(self, leaves: Sequence[Any], steps: ReplaySteps) -> Any:
        """Run the layers on the leaves of a tree; return what the last one returns, with a graph if it trains."""
        made = cast("tuple[torch.Tensor, ...]", _Replay.apply(self, steps, self._anchor, *tensors_of(leaves)))

        def value(result: Any) -> Any:
            match result:
                case Passed(leaf):
                    return leaves[leaf]
                case MadeResult(number, requires_grad):
                    one = made[number]
                    return one.detach().requires_grad_() if requires_grad and not self.trains else one
                case _:
                    return result

        return rp_batch.unflatten(self._out_of, list(map(value, self._results)))

    def run_forward(self, tensors: Iterable[torch.Tensor], steps: ReplaySteps) -> tuple[torch.Tensor, ...]:
        """Replay the forward; return copies of what it makes."""
        for target, source in zip(self._held, tensors, strict=True):
            target.detach().copy_(source)
        for segment in self._segments:
            with steps.forward(segment.layers):
                segment.forward.replay(steps.seeds(segment.drawing))
        return tuple(made.clone() for made in self._made)

    def run_backward(self, grads: Sequence[torch.Tensor | None], steps: ReplaySteps) -> list[torch.Tensor | None]:
        """Replay the backward: gradients are added to the sums; return copies of those of the inputs."""
        of_ends = [grad for grad, is_end in zip(grads, self.is_end, strict=True) if is_end]
        for target, source in zip(self._gradients, of_ends, strict=True):
            # There is one such result, so autograd comes here with its gradient alone.
            assert source is not None
            target.copy_(source)
        for segment in reversed(self._segments):
            if segment.backward is not None:
                with steps.backward(segment.layers, segment.additions):
                    segment.backward.replay()
        return [None if grad is None else grad.clone() for grad in self._input_gradients]

    def close(self) -> None:
        """Free the graphs."""
        for segment in self._segments:
            segment.forward.close()
            if segment.backward is not None:
                segment.backward.close()


class _Replay(torch.autograd.Function):
    """The forward and the backward of layers' graphs."""

    @staticmethod
    def forward(
        ctx: Any, graphs: LayerGraphs, steps: ReplaySteps, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.graphs, ctx.steps = graphs, steps
        ctx.set_materialize_grads(False)
        made = graphs.run_forward(tensors, steps)
        ctx.mark_non_differentiable(*(one for one, is_end in zip(made, graphs.is_end, strict=True) if not is_end))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, None, None, *ctx.graphs.run_backward(grads, ctx.steps)


class _Capturing(Protocol):
    """Captures a body in the pool of the graphs; returns what it returned, and its graph."""

    def __call__(self, body: Callable[[Capture], Any], /, *, num_draws: int = 0) -> tuple[Any, Graph]: ...


class _Ends(NamedTuple):
    """What a backward pass begins with: tensors, and their gradients."""

    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor]


class _Crossing:
    """What goes from one segment to the next, without its graph of autograd: `tree`, with `inside` in it.

    `given`: what came from before; where the segment handed it on as it was, it stays, and the gradient of it is
    added up where it came from.
    """

    def __init__(self, tree: Any, given: Sequence[Any]) -> None:
        leaves, treedef = rp_batch.flatten(tree)
        kept = {id(leaf) for leaf in given}
        made = {
            id(leaf): leaf
            for leaf in tensors_of(leaves)
            if leaf.requires_grad and (id(leaf) not in kept or leaf._version)
        }
        self._made = list(made.values())
        self.inside, self._grad_leaves = enter(self._made, [True] * len(made))
        new = dict(zip(made, self.inside, strict=True))
        self.tree = rp_batch.unflatten(treedef, [new.get(id(leaf), leaf) for leaf in leaves])

    def ends(self) -> _Ends:
        """Where backward of the segment before begins, once that of the one after was captured."""
        grads = (None if leaf is None else leaf.grad for leaf in self._grad_leaves)
        pairs = [(one, grad) for one, grad in zip(self._made, grads, strict=True) if grad is not None]
        return _Ends([one for one, _ in pairs], [grad for _, grad in pairs])


def _difference(before: Additions, after: Additions) -> Additions:
    added = {block: list(map(sub, counts, before[block])) for block, counts in after.items()}
    return {block: counts for block, counts in added.items() if any(counts)}


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
    """What the last layer returned while it was captured: its leaves as `Passed`, `MadeResult` or values."""

    results: list[Any]
    treedef: Any
    made: list[torch.Tensor]


def _seen(tree: Any, inside: Sequence[Any], *, trains: bool) -> _Seen:
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
        else MadeResult(numbers[id(leaf)], leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return _Seen(results, treedef, made)


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)
