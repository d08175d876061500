"""Observe a model's own loss on a few tokens, without running its layers or large matrices."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rp_presets.errors import UnknownLoss
from rp_presets.losses import OwnLoss, OwnLosses, observe_loss
from rp_presets.observing.trace import LayersSeen, undisturbed
from rp_presets.rows import capture
from rp_presets.rows.absent import Spec
from rp_presets.rows.arguments import use_cache_of
from rp_presets.rows.layout import Like, RowLayout
from rp_presets.rows.recorder import direct_tensors
from rp_presets.rows.skeleton import CalledModule, Method, Stub, in_session, skeleton
from rp_presets.rows.trees import leaves, mapped


class Imagined:
    """A `Session` in which layers return their arguments, and linear layers return sine waves of their input.

    How a loss divides depends on the code that computes it, not on weights. As in the model, rows do not mix.
    `tokens`: the number of tokens in the batch that `seen` comes from.
    """

    def __init__(self, layout: RowLayout, seen: Sequence[LayersSeen], tokens: int, device: torch.device) -> None:
        self.device = device
        self._layout = layout
        self._collected = [
            {name: [Spec.of(leaf) for leaf in leaves(values)] for name, values in one.collected.items()}
            for one in seen
        ]
        self._tokens = tokens

    def layer(self, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.layer`."""
        given = direct_tensors((args, kwargs))
        segment = self._layout.segments[stub.segment]
        if stub.index == len(segment.results) - 1:
            self._collect(stub.segment, given[0])
        return mapped(
            lambda leaf: _passed_on(leaf, given) if isinstance(leaf, Like) else leaf, segment.results[stub.index]
        )

    def part(self, part: CalledModule | Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Session.part`."""
        inner = part.held() if isinstance(part, CalledModule) else None
        if isinstance(inner, nn.Dropout):
            return args[0]
        return _waves(args[0], inner.out_features) if isinstance(inner, nn.Linear) else part.run(args, kwargs)

    def read(self, part: CalledModule, name: str) -> Any:
        """See `Session.read`."""
        return getattr(part.held(), name)

    def _collect(self, segment: int, hidden: Tensor) -> None:
        for name, values in capture.wanted().items():
            for number, spec in enumerate(self._collected[segment].get(name, ())):
                rows = (
                    hidden.flatten(0, 1)
                    if isinstance(spec, Spec) and spec.shape[:1] == (self._tokens,)
                    else hidden
                )
                values.append(_waves(rows, spec.shape[-1], number + 1) if isinstance(spec, Spec) else spec)


def _passed_on(like: Like, given: Sequence[Tensor]) -> Tensor:
    # Nothing is known of other results, which only layers read.
    return torch.zeros(()) if like.argument is None else given[like.argument]


def _waves(rows: Tensor, width: int, number: int = 1) -> Tensor:
    """Return numbers for each row that depend only on that row: (..., width)."""
    phase = rows.double().mean(-1, keepdim=True) * 100 + number
    waves = torch.sin(phase * torch.arange(1, width + 1, dtype=torch.float64, device=rows.device))
    return waves.to(torch.promote_types(rows.dtype, torch.float32))


def own_losses(
    model: nn.Module, layout: RowLayout, seen: Sequence[LayersSeen], inputs: Mapping[str, Any]
) -> OwnLosses:
    """Return the model's own losses, each observed at the first call with its kind of labels."""
    first = next(value for value in inputs.values() if isinstance(value, Tensor))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    session = Imagined(layout, seen, first.shape[:2].numel(), device)

    def observe_in(mode: bool, batch: Mapping[str, Any]) -> OwnLoss:
        with undisturbed(model), in_session(session):
            model.train(mode)
            bare = skeleton(model, layout.starts(), lambda _: True, layout.spine, layout.written)
            _give_own_configs(bare.train(mode))
            try:
                return observe_loss(lambda given: bare(**given, **use_cache_of(layout)), batch)
            except UnknownLoss:
                raise
            except Exception as error:
                raise UnknownLoss(f"its loss could not be observed: {type(error).__name__}: {error}") from error

    def observe(kwargs: Mapping[str, Any]) -> OwnLoss:
        batch = _batch(inputs, kwargs)
        try:
            return observe_in(False, batch)
        except UnknownLoss:
            # In eval mode some models do more than turn off dropout: RWKV divides its layers' weights.
            if not model.training:
                raise
        return observe_in(True, batch)

    return OwnLosses(observe)


def _give_own_configs(bare: nn.Module) -> None:
    # Some classifiers write the kind of their labels into their config.
    for module in bare.modules():
        if "config" in vars(module):
            vars(module)["config"] = copy.copy(vars(module)["config"])


def _batch(inputs: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Make a batch of twice the rows of the inputs, with labels of the same kind as in `kwargs`."""
    batch = {name: _twice(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    first = next(value for value in batch.values() if isinstance(value, Tensor))
    labels: Tensor = kwargs["labels"]
    if kwargs.get("attention_mask") is not None and first.ndim == 2:
        batch["attention_mask"] = torch.ones_like(first)
    generator = torch.Generator().manual_seed(0)
    if labels.is_floating_point():
        return batch | {"labels": torch.rand(len(first), *labels.shape[1:], generator=generator)}
    ids = batch.get("decoder_input_ids", first)
    shape = (len(first), *(ids.shape[1:2] if labels.ndim > 1 else ()))
    return batch | {"labels": torch.randint(2, shape, generator=generator)}


def _twice(tensor: Tensor) -> Tensor:
    other = -tensor if tensor.is_floating_point() else tensor.roll(1, -1)
    return torch.cat([tensor, other])
