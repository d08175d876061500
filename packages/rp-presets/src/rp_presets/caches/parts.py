"""A cache whose samples are in microbatches: one cache a microbatch for the layers, one for whoever holds it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast, overload

import torch
from torch import Tensor

from rp_presets.caches.before import is_state, structure
from rp_presets.caches.places import CachePlaces

# Layers call these with one microbatch's tensors.
_OF_LAYERS = frozenset(
    {"update", "update_conv_state", "update_recurrent_state", "update_indexer", "lazy_initialization"}
)


def sizes_of(cache: object) -> tuple[int, ...] | None:
    """Return how many samples each microbatch of a cache has; None for one that is not in microbatches."""
    layers = getattr(cache, "layers", None)
    return layers.sizes if isinstance(layers, LayersInParts) else None


def in_parts(cache: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a cache for each microbatch, with its samples; the cache itself then stands for all of them.

    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> for part in in_parts(cache, (2, 1)):
    ...     _ = part.update(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8), 0)
    >>> cache.get_seq_length(), len(cache)
    (4, 1)

    It tells their length, reorders, crops and resets them, each sample where it is. What the cache holds already
    is divided. `sizes`: of the microbatches; of a cache that is in parts already, its own.

    Raises `ValueError` for a cache that holds more than layers of transformers, or other samples than `sizes`.
    """
    if sizes_of(cache) is None:
        _check(cache, sum(sizes))
        ends = [0, *accumulate(sizes)]
        cache.layers = LayersInParts([_selected(cache, range(*ends)) for ends in pairwise(ends)], sizes)
    layers = cast("LayersInParts", cache.layers)
    layers.drop_empty()
    if layers.sizes != tuple(sizes):
        raise ValueError(
            f"the cache holds samples in microbatches of {layers.sizes}, but the call has microbatches of "
            f"{tuple(sizes)}; make a new cache for other samples"
        )
    return layers.caches


def tells_samples(cache: object) -> bool:
    """Return whether a cache's layers tell where they hold samples, so that these can be divided and chosen.

    >>> from transformers import DynamicCache
    >>> tells_samples(DynamicCache())
    True
    """
    # Other classes hold keys where nothing here looks for them.
    is_known = is_state(cache) and type(cache).__module__ == "transformers.cache_utils"
    return is_known and hasattr(cache, "layers")


def choose(cache: Any, index: Tensor) -> None:
    """Let a cache hold other samples of those that it has, also one of them several times.

    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> _ = cache.update(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8), 0)
    >>> choose(cache, torch.tensor([0, 1, 1]))
    >>> cache.layers[0].keys.shape
    torch.Size([3, 1, 4, 8])

    `index`: (samples,), of those before. In a cache in microbatches, samples stay in theirs.

    Raises `ValueError` for samples of a cache in microbatches that are not in their order.
    """
    if isinstance(cache.layers, LayersInParts):
        cache.layers.choose(index)
    else:
        for layer in cache.layers:
            _choose(layer, index)


def _choose(layer: Any, index: Tensor) -> None:
    # Each kind of layer knows where it has samples.
    layer.reorder_cache(index)
    if hasattr(layer, "batch_size"):
        layer.batch_size = len(index)


def _check(cache: Any, num_samples: int) -> None:
    if not tells_samples(cache):
        raise ValueError(
            f"the samples of a {type(cache).__name__} cannot be divided between microbatches, since only "
            "transformers' own caches of layers tell where they hold them; call with num_microbatch=1"
        )
    for layer in cache.layers:
        held = _num_samples(layer)
        if held not in (None, num_samples):
            raise ValueError(f"the cache holds {held} samples, but the call has {num_samples}")


def _num_samples(layer: Any) -> int | None:
    keys = getattr(layer, "keys", None)
    return len(keys) if isinstance(keys, Tensor) and keys.numel() else None


def _selected(cache: Any, samples: range) -> Any:
    """A cache with some of a cache's samples. Tensors of one number, which layers count in, are its own."""
    own: Any = structure(cache, lambda tensor: tensor.clone() if tensor.numel() == 1 else tensor)
    for layer in own.layers:
        _choose(layer, torch.arange(samples.start, samples.stop))
        if _num_samples(layer) not in (None, len(samples)):
            # It was made for all samples, and has none of them yet.
            layer.is_initialized, layer.keys, layer.values = False, None, None
    return own


class LayersInParts(Sequence[Any]):
    """The layers of a cache in microbatches: each stands for those of all microbatches.

    `caches`: one a microbatch. Their layers may come to be while they are used. `sizes`: their samples.
    """

    def __init__(self, caches: Sequence[Any], sizes: Sequence[int]) -> None:
        self.caches = list(caches)
        self._sizes = tuple(sizes)
        self._layers: list[LayerInParts] = []
        self._places = CachePlaces()

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many samples each microbatch has."""
        return vars(self._layers[0])["sizes"] if self._layers else self._sizes

    def drop_empty(self) -> None:
        """Forget microbatches none of whose samples is left."""
        sizes = self.sizes
        if 0 in sizes:
            self.caches = [cache for cache, size in zip(self.caches, sizes, strict=True) if size]
            self._sizes = tuple(size for size in sizes if size)
            self._layers = []

    def choose(self, index: Tensor) -> None:
        """Choose samples; see the function of that name."""
        for layer in self:
            own = vars(layer)
            chosen = self._places.chosen(index, own["sizes"])
            for one, places in zip(own["parts"], chosen, strict=True):
                _choose(one, places)
            own["sizes"] = tuple(map(len, chosen))
        self.drop_empty()

    def __len__(self) -> int:
        return len(self.caches[0].layers)

    @overload
    def __getitem__(self, index: int) -> LayerInParts: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerInParts]: ...
    def __getitem__(self, index: int | slice) -> LayerInParts | list[LayerInParts]:
        """Return a layer that stands for those of all microbatches."""
        while len(self._layers) < len(self):
            layers = [cache.layers[len(self._layers)] for cache in self.caches]
            self._layers.append(LayerInParts(layers, self.sizes, self._places))
        return self._layers[: len(self)][index]

    def __iter__(self) -> Iterator[LayerInParts]:
        return iter(self[:])

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return LayersInParts, (self.caches, self.sizes)


class LayerInParts:
    """One layer of a cache, for the caches of all microbatches.

    `layers`: one a microbatch. `sizes`: their samples. `places`: where samples are, shared by a cache's layers.
    """

    def __init__(self, layers: Sequence[Any], sizes: tuple[int, ...], places: CachePlaces) -> None:
        # Attributes that are set later are those of `layers`.
        vars(self).update(parts=list(layers), sizes=sizes, places=places)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - it is not set
        """The class of the layers, which transformers asks for."""
        return type(cast("object", vars(self)["parts"][0]))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each sample the keys of another one. Samples that change places are in one microbatch."""
        own = vars(self)
        for layer, places in zip(own["parts"], own["places"].within(beam_idx, own["sizes"]), strict=True):
            layer.reorder_cache(places)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the samples, in their order."""
        own = vars(self)
        chosen = own["places"].chosen(indices, own["sizes"])
        for layer, places in zip(own["parts"], chosen, strict=True):
            layer.batch_select_indices(places)
        own["sizes"] = tuple(map(len, chosen))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample, the copies one after another."""
        own = vars(self)
        for layer in own["parts"]:
            layer.batch_repeat_interleave(repeats)
        own["sizes"] = tuple(size * repeats for size in own["sizes"])

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        # Layers that do not tell theirs do not tell it here.
        if not hasattr(vars(self)["parts"][0], "batch_size"):
            raise AttributeError("batch_size")
        return sum(vars(self)["sizes"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = vars(self)
        # A microbatch none of whose samples is left does not tell a length any more.
        held = [(layer, size) for layer, size in zip(own["parts"], own["sizes"], strict=True) if size]
        found = [getattr(layer, name) for layer, _ in held]
        if name in _OF_LAYERS:
            raise ValueError(
                f"this cache holds its samples in {len(own['parts'])} microbatches, as a wrapped model has left "
                "it, and only wrapped models can go on with it; with num_microbatch=1 they leave it in one piece"
            )
        if callable(found[0]):
            return _of_each(found)
        return _together(found, [size for _, size in held])

    def __setattr__(self, name: str, value: Any) -> None:
        for layer in vars(self)["parts"]:
            setattr(layer, name, value)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__} of {vars(self)['sizes']} samples"

    def __reduce__(self) -> tuple[Any, ...]:
        own = vars(self)
        return LayerInParts, (own["parts"], own["sizes"], CachePlaces())

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerInParts:
        own = vars(self)
        return LayerInParts(copy.deepcopy(own["parts"], memo), own["sizes"], CachePlaces())


def _of_each(methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def call_all(*args: Any, **kwargs: Any) -> Any:
        # Such as a length, which is one for all samples.
        first, *_ = [method(*args, **kwargs) for method in methods]
        return first

    return call_all


def _together(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The value of all microbatches: tensors of samples one after another, others as the first one's."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _together([value[key] for value in values], sizes) for key in cast("Any", first)}
    has_samples = [
        isinstance(one, Tensor) and one.ndim > 1 and len(one) == n for one, n in zip(values, sizes, strict=True)
    ]
    return torch.cat(list(values)) if all(has_samples) else first
