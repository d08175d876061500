"""Observe each layer's arithmetic and memory in one pass of a model on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import rp_batch
import torch
from rp_presets import lists_of_layers
from torch import Tensor, nn

from rp_estimate.meta.by_shapes import by_shapes
from rp_estimate.meta.facts import Holder, Observed, itemsize
from rp_estimate.meta.figures import Figures, growing
from rp_estimate.meta.meter import (
    FusedAttention,
    Meter,
    autocast_on_meta,
    kept_tensors,
    storage_bytes,
    tensors_in,
)
from rp_estimate.meta.products import UncountedWarning

_BACKWARD_PER_FORWARD = 2


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
        facts = tuple(growing(*each) for each in zip(one.figures, two.figures, strict=True))
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """A model as it ran with a number of sequences."""

    figures: list[Figures]
    uncounted: set[str]
    modules: tuple[nn.Module, ...]
    hidden: int
    vocabulary: int


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
        self._kinds: dict[object, tuple[Figures, Any]] = {}
        self._called: list[tuple[nn.Module, Figures]] = []
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
        hidden = hidden_bytes // (tokens * itemsize(self._model))
        return _Seen(figures, self._uncounted | self._meter.uncounted, tuple(modules), hidden, vocabulary)


def _measured(
    layer: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    uncounted: set[str],
) -> tuple[Figures, Any]:
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
    return Figures(
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


def _figures_around(around: _Around, boundary_bytes: int, kept: int = 0) -> Figures:
    trained = any(tensor.requires_grad for tensor in around.tensors.values() if tensor.ndim > 1)
    times = _BACKWARD_PER_FORWARD if trained else 1
    return Figures(around.flops, times * around.flops, boundary_bytes, kept)


def _without_cache(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


def _detached(tree: Any) -> Any:
    return rp_batch.map_leaves(_without_graph, tree)


def _without_graph(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
