"""Observe each layer's arithmetic and memory in one pass of a model on the meta device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import rp_batch
import torch
from rp_presets import lists_of_layers
from torch import Tensor, nn

from rp_cli.estimate.meta.meter import (
    FusedAttention,
    Meter,
    autocast_on_meta,
    kept_tensors,
    storage_bytes,
    tensors_in,
)
from rp_cli.estimate.meta.products import UncountedWarning

_BACKWARD_PER_FORWARD = 2


@dataclass(frozen=True, slots=True)
class Growth:
    """An amount that all sequences of a microbatch share, and as much again for each of them.

    >>> Growth(each=3, shared=10).of(2)
    16
    """

    each: int = 0
    shared: int = 0

    @classmethod
    def through(cls, one: int, two: int) -> Growth:
        """Return the growth of an amount for one sequence, and for two."""
        return cls(two - one, 2 * one - two)

    def of(self, sequences: int, part: float = 1.0) -> float:
        """Return the amount for so many sequences. `part`: how much of what is for each counts."""
        return self.shared + sequences * self.each * part


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """The operations and bytes of a layer.

    `forward_flops`, `backward_flops`: floating-point operations. `boundary_bytes`: of its output for one sequence.
    `kept_bytes`: of the tensors that autograd keeps for backward, without weights. `held_bytes`: what is in memory
    beyond that at some moments, the most of which counts. What layers compute of their weights alone, as adapters
    on stacked experts do, is shared by the sequences of a microbatch.
    """

    forward_flops: Growth = Growth()
    backward_flops: Growth = Growth()
    boundary_bytes: int = 0
    kept_bytes: Growth = Growth()
    held_bytes: tuple[Growth, ...] = ()

    def working_bytes(self, sequences: int, part: float = 1.0) -> int:
        """Return the most bytes at once beyond kept ones. `part`: how much of what is for each sequence counts."""
        return int(max((held.of(sequences, part) for held in self.held_bytes), default=0))


@dataclass(frozen=True, slots=True)
class Observed:
    """A model as a row: its own layers, between the code that runs before and after them.

    `facts`, `modules`: of each part of the row; a module lists the tensors that the part uses. `vocabulary`: the
    width of the logits; 0 for a model without logits. `is_counted`: whether the model ran on the meta device.
    Otherwise operations are two for each element of a matrix and token, and activations are guessed from widths.
    """

    facts: tuple[LayerFacts, ...]
    modules: tuple[nn.Module, ...]
    hidden: int
    vocabulary: int
    is_counted: bool


class Uncountable(Exception):
    """The model cannot run on the meta device; the message says why."""


def observe(model: nn.Module, sequence: int) -> Observed:
    """Count the operations and bytes of a language model's layers for one sequence of `sequence` tokens.

    Layers of one kind are run once. The model is on the meta device; no weight is read, and nothing is computed.
    """
    try:
        one, two = (_Pass(model).run(sequences, sequence) for sequences in (1, 2))
        if one.uncounted:
            _warn(model, one.uncounted)
        facts = tuple(_growing(*each) for each in zip(one.figures, two.figures, strict=True))
        return Observed(facts, one.modules, one.hidden, one.vocabulary, is_counted=True)
    except Uncountable:
        return by_shapes(model, sequence)


def _warn(model: nn.Module, uncounted: set[str]) -> None:
    names = ", ".join(sorted(uncounted))
    warnings.warn(
        f"the arithmetic of {names} in a {type(model).__name__} is not known and not counted, so steps take "
        "longer than is said",
        UncountedWarning,
        stacklevel=2,
    )


def by_shapes(model: nn.Module, sequence: int) -> Observed:
    """Guess operations and bytes from the shapes of weights, for models that cannot run on the meta device."""
    layers = [layer for found in lists_of_layers(model).values() for layer in found]
    inside = {id(tensor) for layer in layers for tensor in layer.parameters()}
    around = [tensor for tensor in model.parameters() if id(tensor) not in inside]
    config = getattr(model, "config", None)
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    head = [tensor for tensor in around if tensor.ndim > 1 and tensor.shape[0] == vocabulary][-1:]
    rest = [tensor for tensor in around if all(tensor is not one for one in head)]
    hidden = int(getattr(config, "hidden_size", 0) or (head[0].shape[1] if head else 1))
    experts = _experts_share(config)
    width = hidden * _itemsize(model)
    facts = [_guessed(list(layer.parameters()), sequence, width, experts) for layer in layers]
    last = _guessed(head, sequence, width, 1.0)
    return Observed(
        (LayerFacts(boundary_bytes=sequence * width), *facts, last),
        (Holder(rest or head), *layers, Holder(head)),
        hidden,
        vocabulary,
        is_counted=False,
    )


@dataclass(frozen=True, slots=True)
class _Figures:
    """What a part of the row takes for a number of sequences; see `LayerFacts`."""

    forward_flops: int = 0
    backward_flops: int = 0
    boundary_bytes: int = 0
    kept_bytes: int = 0
    held_bytes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A model as it ran with a number of sequences."""

    figures: list[_Figures]
    uncounted: set[str]
    modules: tuple[nn.Module, ...]
    hidden: int
    vocabulary: int


def _growing(one: _Figures, two: _Figures) -> LayerFacts:
    """Return the facts of a part, from its figures for one sequence and for two."""
    forward, backward, kept = (
        Growth.through(getattr(one, name), getattr(two, name))
        for name in ("forward_flops", "backward_flops", "kept_bytes")
    )
    if len(one.held_bytes) == len(two.held_bytes):
        pairs = zip(one.held_bytes, two.held_bytes, strict=True)
        held = [Growth.through(first - one.kept_bytes, second - two.kept_bytes) for first, second in pairs]
    else:
        # Code that runs once for each sequence: nothing is known to be shared.
        held = [Growth(max(one.held_bytes) - one.kept_bytes)]
    return LayerFacts(forward, backward, one.boundary_bytes, kept, _most(held))


def _most(held: Sequence[Growth]) -> tuple[Growth, ...]:
    """Return what may be the most for some number of sequences: others have both less shared and less for each."""
    found: list[Growth] = []
    for one in sorted(set(held), key=lambda growth: (-growth.each, -growth.shared)):
        if one.of(1) > 0 and (not found or one.shared > found[-1].shared):
            found.append(one)
    return tuple(found)


class Holder(nn.Module):
    """The tensors that a part of the row uses outside the model's own layers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"tensor{number}", tensor)
            else:
                self.register_buffer(f"tensor{number}", tensor)


@dataclass(slots=True)
class _Around:
    """The operations and tensors outside the layers, since the previous layer."""

    flops: int = 0
    tensors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class _Pass:
    """One pass of a model's forward, whose layers are measured as they are called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._kinds: dict[object, tuple[_Figures, Any]] = {}
        self._called: list[tuple[nn.Module, _Figures]] = []
        self._around = [_Around()]
        self._inside = False
        self._uncounted: set[str] = set()
        self._meter = Meter(self._note_used)

    def run(self, sequences: int, sequence: int) -> _Seen:
        ids = torch.zeros(sequences, sequence, dtype=torch.long, device="meta")
        before: list[tuple[nn.Module, Any]] = []
        try:
            for found in lists_of_layers(self._model).values():
                for layer in found:
                    before.append((layer, vars(layer).get("forward")))
                    layer.forward = self._watched(layer, layer.forward)
            with torch.no_grad(), autocast_on_meta(), FusedAttention(), self._meter:
                out = self._model(input_ids=ids, **_without_cache(self._model))
        except Exception as error:  # models are foreign code, and may read values, of which there are none
            raise Uncountable(f"{type(error).__name__}: {error}") from error
        finally:
            for layer, forward in before:
                _restore(layer, forward)
        self._mark()
        if not self._called:
            raise Uncountable("it called none of its layers")
        return self._seen(getattr(out, "logits", None), sequences * sequence)

    def _watched(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._mark()
            kind = _kind(layer, args, kwargs)
            if kind not in self._kinds:
                self._inside = True
                self._kinds[kind] = _measured(layer, forward, args, kwargs, self._uncounted)
                self._inside = False
            facts, out = self._kinds[kind]
            self._called.append((layer, facts))
            self._around.append(_Around())
            self._flops = self._meter.flops
            return _detached(out)

        return run

    _flops = 0

    def _mark(self) -> None:
        """Attribute what the meter has counted since the last layer to the code outside the layers."""
        self._around[-1].flops += self._meter.flops - self._flops
        self._flops = self._meter.flops

    def _note_used(self, tensor: Tensor) -> None:
        if not self._inside and id(tensor) in self._own:
            self._around[-1].tensors[id(tensor)] = tensor

    def _unused(self) -> list[Tensor]:
        """Return the tensors that neither a layer nor the code around has used; the host holds them, too."""
        used = {key for around in self._around for key in around.tensors}
        used |= {id(tensor) for layer, _ in self._called for tensor in (*layer.parameters(), *layer.buffers())}
        return [tensor for key, tensor in self._own.items() if key not in used]

    def _seen(self, logits: object, tokens: int) -> _Seen:
        first, *between, last = self._around
        hidden_bytes = self._called[-1][1].boundary_bytes
        figures = [_figures_around(first, hidden_bytes)]
        modules: list[nn.Module] = [Holder([*first.tensors.values(), *self._unused()])]
        # Code between two lists of layers counts as a separate part only if it computes something.
        for (layer, one), after in zip(self._called, [*between, None], strict=True):
            figures.append(one)
            modules.append(layer)
            if after is not None and after.flops:
                figures.append(_figures_around(after, hidden_bytes))
                modules.append(Holder(list(after.tensors.values())))
        vocabulary = logits.shape[-1] if isinstance(logits, Tensor) else 0
        figures.append(_figures_around(last, 0, kept=3 * hidden_bytes))
        modules.append(Holder(list(last.tensors.values())))
        hidden = hidden_bytes // (tokens * _itemsize(self._model))
        return _Seen(figures, self._uncounted | self._meter.uncounted, tuple(modules), hidden, vocabulary)


def _measured(
    layer: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    uncounted: set[str],
) -> tuple[_Figures, Any]:
    """Run one layer forward and backward; return its figures and output. Add to `uncounted` what is not known."""
    (args, kwargs), given = _inputs((args, dict(kwargs)))
    own = [*layer.parameters(), *layer.buffers()]
    meter = Meter()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        kept = stack.enter_context(kept_tensors())
        stack.enter_context(meter)
        out = forward(*args, **kwargs)
        results = [leaf for leaf in tensors_in(out) if leaf.requires_grad]
        forward_flops, kept_bytes = meter.flops, storage_bytes(kept, own)
        # Backward frees kept tensors after their use.
        kept.clear()
        wanted = [leaf for leaf in [*given, *own] if leaf.requires_grad]
        trained: list[Any] = [weight for weight in own if weight.requires_grad]
        for weight in trained:
            stack.callback(weight.register_hook(meter.leave_out).remove)
        grads = [torch.empty_like(leaf) for leaf in results]
        if wanted and results:
            torch.autograd.grad(results, wanted, grads, allow_unused=True)
    uncounted |= meter.uncounted
    return _Figures(
        forward_flops,
        meter.flops - forward_flops,
        storage_bytes(tensors_in(out), [*own]),
        kept_bytes,
        meter.held_bytes,
    ), _detached(out)


def _inputs(tree: Any) -> tuple[Any, list[Tensor]]:
    """Make the first floating-point tensor, which is the previous layer's output, require grad."""
    given: list[Tensor] = []

    def enter(leaf: Any) -> Any:
        if given or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        given.append(leaf.detach().requires_grad_())
        return given[0]

    return rp_batch.map_leaves(enter, tree), given


def _kind(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Return a layer's modules, settings, shapes and arguments: if they are equal, costs are equal, too."""
    shapes = tuple((name, _spec(tensor)) for name, tensor in layer.named_parameters())
    settings = tuple(setting for module in layer.modules() for setting in _settings(module))
    names = tuple(type(module) for module in layer.modules())
    given = tuple(map(_spec, tensors_in((args, kwargs))))
    return names, shapes, settings, given


def _settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's attributes that are numbers or text, such as a kind of attention, without its index."""
    for name, value in sorted(vars(module).items()):
        if isinstance(value, str | int | float) and "idx" not in name and "index" not in name:
            yield name, value


def _spec(tensor: Tensor) -> object:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _figures_around(around: _Around, boundary_bytes: int, kept: int = 0) -> _Figures:
    trained = any(tensor.requires_grad for tensor in around.tensors.values() if tensor.ndim > 1)
    times = _BACKWARD_PER_FORWARD if trained else 1
    return _Figures(around.flops, times * around.flops, boundary_bytes, kept)


def _guessed(tensors: Sequence[Tensor], sequence: int, width: int, experts: float) -> LayerFacts:
    """Guess two operations for each element and token; a matrix's input and its output are kept for backward."""
    matrices = [tensor for tensor in tensors if tensor.ndim > 1]
    used = [math.prod(tensor.shape) * (experts if tensor.ndim > 2 else 1.0) for tensor in matrices]
    forward = int(2 * sequence * sum(used))
    trained = sum(one for one, tensor in zip(used, matrices, strict=True) if tensor.requires_grad)
    backward = forward + int(2 * sequence * trained)
    rows = sum((tensor.shape[-2] + tensor.shape[-1]) * tensor.element_size() for tensor in matrices)
    kept = Growth(2 * sequence * rows)
    return LayerFacts(Growth(forward), Growth(backward), sequence * width, kept, (kept,))


def _experts_share(config: object) -> float:
    """Return the share of a mixture's experts that a token passes through."""
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((found for name in names if (found := getattr(config, name, None))), None)
    return chosen / total if chosen and total else 1.0


def _without_cache(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


def _itemsize(model: nn.Module) -> int:
    return max((tensor.element_size() for tensor in model.parameters()), default=2)


def _detached(tree: Any) -> Any:
    return rp_batch.map_leaves(_without_graph, tree)


def _without_graph(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
