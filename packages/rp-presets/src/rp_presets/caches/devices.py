"""A cache's tensors go to the devices where layers read them: a caller may have read a prompt elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rp_presets.caches.before import PLAIN, structure


def indices_in_caches(layer: nn.Module) -> frozenset[int]:
    """Return which layers of a cache one of the model's layers writes, as transformers' modules tell.

    >>> attention = nn.Linear(1, 1)
    >>> attention.layer_idx = 3
    >>> sorted(indices_in_caches(nn.Sequential(attention, nn.Tanh())))
    [3]
    """
    found = (getattr(module, "layer_idx", None) for module in layer.modules())
    return frozenset(index for index in found if isinstance(index, int))


def bring(cache: Any, indices: Collection[int], device: torch.device) -> None:
    """Let layers of a cache hold all their tensors on a device.

    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> _ = cache.update(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8), 0)
    >>> bring(cache, {0, 1}, torch.device("meta"))
    >>> cache.layers[0].keys.device
    device(type='meta')

    `indices`: of the layers; those that the cache does not have yet are made there.
    """
    # An encoder-decoder has a cache of its decoder's own keys, and one of those of the encoder's output.
    inner = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    for each in [cache, *(one for one in inner if one is not None)]:
        layers: Sequence[Any] = getattr(each, "layers", ())
        for index in indices:
            if index < len(layers):
                _move(layers[index], device)


def _move(layer: Any, device: torch.device) -> None:
    held = cast("dict[str, object]", vars(layer))
    if all(_is_there(value, device) for value in held.values()):
        return
    elsewhere: list[Tensor] = []

    def moved(tensor: Tensor) -> Tensor:
        if _is_there(tensor, device):
            return tensor
        elsewhere.append(tensor)
        return tensor.to(device, copy=True)

    copied = cast("dict[str, Any]", vars(structure(layer, moved)))
    if elsewhere:
        # Devices are where it makes tensors later.
        for name, value in copied.items():
            setattr(layer, name, device if isinstance(value, torch.device) else value)


def _is_there(value: object, device: torch.device) -> bool:
    """Whether nothing of an attribute is elsewhere, so far as that shows without looking into objects.

    A tensor that a caller made in inference mode is: layers run outside of that, where nobody may write it.
    """
    if isinstance(value, Tensor):
        return value.device == device and not value.is_inference()
    return isinstance(value, PLAIN)
