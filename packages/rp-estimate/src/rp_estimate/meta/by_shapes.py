"""Guess each layer's arithmetic and memory from the shapes of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rp_presets import lists_of_layers
from torch import Tensor, nn

from rp_estimate.meta.facts import Growth, Holder, LayerAmounts, Observed, itemsize


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
    width = hidden * itemsize(model)
    facts = [_guessed(list(layer.parameters()), sequence, width, experts) for layer in layers]
    last = _guessed(head, sequence, width, 1.0)
    return Observed(
        (LayerAmounts(boundary_bytes=sequence * width), *facts, last),
        (Holder(rest or head), *layers, Holder(head)),
        hidden,
        vocabulary,
        is_counted=False,
    )


def _guessed(tensors: Sequence[Tensor], sequence: int, width: int, experts: float) -> LayerAmounts:
    """Guess two operations for each element and token; a matrix's input and its output are kept for backward."""
    matrices = [tensor for tensor in tensors if tensor.ndim > 1]
    used = [math.prod(tensor.shape) * (experts if tensor.ndim > 2 else 1.0) for tensor in matrices]
    forward = int(2 * sequence * sum(used))
    trained = sum(one for one, tensor in zip(used, matrices, strict=True) if tensor.requires_grad)
    backward = forward + int(2 * sequence * trained)
    rows = sum((tensor.shape[-2] + tensor.shape[-1]) * tensor.element_size() for tensor in matrices)
    kept = Growth(2 * sequence * rows)
    return LayerAmounts(Growth(forward), Growth(backward), sequence * width, kept, (kept,))


def _experts_share(config: object) -> float:
    """Return the share of a mixture's experts that a token passes through."""
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((found for name in names if (found := getattr(config, name, None))), None)
    return chosen / total if chosen and total else 1.0
