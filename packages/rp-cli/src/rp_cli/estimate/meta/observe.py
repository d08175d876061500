"""Observe each layer's arithmetic and memory in one pass of a model on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import rp_batch
import torch
from rp_presets import lists_of_layers
from torch import Tensor, nn

from rp_cli.estimate.meta.meter import FusedAttention, Meter, kept_tensors, storage_bytes, tensors_in

_BACKWARD_PER_FORWARD = 2


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """The operations and bytes of a layer for one sequence.

    `forward_flops`, `backward_flops`: floating-point operations. `boundary_bytes`: of its output. `kept_bytes`: of
    the tensors that autograd keeps for backward, without weights. `working_bytes`: the most in memory beyond that.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    boundary_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0


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
        return _Pass(model).run(sequence)
    except Uncountable:
        return by_shapes(model, sequence)


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
        self._kinds: dict[object, tuple[LayerFacts, Any]] = {}
        self._called: list[tuple[nn.Module, LayerFacts]] = []
        self._around = [_Around()]
        self._inside = False
        self._meter = Meter(self._note_used)

    def run(self, sequence: int) -> Observed:
        ids = torch.zeros(1, sequence, dtype=torch.long, device="meta")
        before: list[tuple[nn.Module, Any]] = []
        try:
            for found in lists_of_layers(self._model).values():
                for layer in found:
                    before.append((layer, vars(layer).get("forward")))
                    layer.forward = self._watched(layer, layer.forward)
            with torch.no_grad(), FusedAttention(), self._meter:
                out = self._model(input_ids=ids, **_without_cache(self._model))
        except Exception as error:  # models are foreign code, and may read values, of which there are none
            raise Uncountable(f"{type(error).__name__}: {error}") from error
        finally:
            for layer, forward in before:
                _restore(layer, forward)
        self._mark()
        if not self._called:
            raise Uncountable("it called none of its layers")
        return self._observed(getattr(out, "logits", None), sequence)

    def _watched(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._mark()
            kind = _kind(layer, args, kwargs)
            if kind not in self._kinds:
                self._inside = True
                self._kinds[kind] = _measured(layer, forward, args, kwargs)
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

    def _observed(self, logits: object, sequence: int) -> Observed:
        first, *between, last = self._around
        hidden_bytes = self._called[-1][1].boundary_bytes
        facts = [_around_facts(first, hidden_bytes)]
        modules: list[nn.Module] = [Holder([*first.tensors.values(), *self._unused()])]
        # Code between two lists of layers counts as a separate part only if it computes something.
        for (layer, one), after in zip(self._called, [*between, None], strict=True):
            facts.append(one)
            modules.append(layer)
            if after is not None and after.flops:
                facts.append(_around_facts(after, hidden_bytes))
                modules.append(Holder(list(after.tensors.values())))
        vocabulary = logits.shape[-1] if isinstance(logits, Tensor) else 0
        facts.append(_around_facts(last, 0, kept=3 * hidden_bytes))
        modules.append(Holder(list(last.tensors.values())))
        hidden = hidden_bytes // (sequence * _itemsize(self._model))
        return Observed(tuple(facts), tuple(modules), hidden, vocabulary, is_counted=True)


def _measured(
    layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[LayerFacts, Any]:
    """Run one layer forward and backward; return its facts and its output."""
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
        grads = [torch.empty_like(leaf) for leaf in results]
        if wanted and results:
            torch.autograd.grad(results, wanted, grads, allow_unused=True)
    # Gradients of weights are counted with the weights.
    gradients = sum(tensor.nbytes for tensor in own if tensor.requires_grad)
    return LayerFacts(
        forward_flops,
        meter.flops - forward_flops,
        storage_bytes(tensors_in(out), [*own]),
        kept_bytes,
        max(meter.peak_bytes - gradients - kept_bytes, 0),
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


def _around_facts(around: _Around, boundary_bytes: int, kept: int = 0) -> LayerFacts:
    trained = any(tensor.requires_grad for tensor in around.tensors.values() if tensor.ndim > 1)
    times = _BACKWARD_PER_FORWARD if trained else 1
    return LayerFacts(around.flops, times * around.flops, boundary_bytes, kept)


def _guessed(tensors: Sequence[Tensor], sequence: int, width: int, experts: float) -> LayerFacts:
    """Guess two operations for each element and token; a matrix's input and its output are kept for backward."""
    matrices = [tensor for tensor in tensors if tensor.ndim > 1]
    used = [math.prod(tensor.shape) * (experts if tensor.ndim > 2 else 1.0) for tensor in matrices]
    forward = int(2 * sequence * sum(used))
    trained = sum(one for one, tensor in zip(used, matrices, strict=True) if tensor.requires_grad)
    backward = forward + int(2 * sequence * trained)
    rows = sum((tensor.shape[-2] + tensor.shape[-1]) * tensor.element_size() for tensor in matrices)
    return LayerFacts(forward, backward, sequence * width, 2 * sequence * rows, 2 * sequence * rows)


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
