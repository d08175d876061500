"""`generate` of the user's own model, with a forward that runs on the devices; the loop is the model's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, cast

import rp_batch
import torch
from torch import nn

from rp_generate.by_samples import BySamples
from rp_generate.fewer_rows import FewerRows, recorded
from rp_generate.row import DividesCaches, GeneratingLayers


def generated(
    model: nn.Module,
    forward: Callable[..., Any],
    device: torch.device,
    row: GeneratingLayers,
    dividing: Callable[[int], DividesCaches],
    make_room: Callable[[float, float], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a model's `generate` with another forward; tensors of the result are where those of the arguments are.

    `device`: where the loop's own work is done, such as sampling. `row`: what forward runs. `dividing`: makes, of
    the number of rows that stay together, a sample's beams, what divides the caches of a call that the loop makes.
    `make_room`: see `FewerRows`.

    Images go to forward as pixels, with the samples whose placeholders they fill.

    Raises what the row raises for images; `ValueError` for a model that makes a cache in forward, for an encoder
    with a decoder, for ``assistant_early_exit``, and for a PEFT model that learns prompts, whose `generate` does
    more than its inner model's.
    """
    moved = rp_batch.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, kwargs)
    given = rp_batch.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, args)
    inner = _inner(model)
    _refuse_encoder(inner)
    named = _by_name(inner, args) | kwargs
    _refuse_early_exit(inner, named)
    divided = dividing(_setting(inner, named, "num_beams", 1))
    is_guided = _setting(inner, named, "guidance_scale", 1) != 1
    own = _Forward(forward, inner, row, divided, make_room, is_guided=is_guided)
    # A cache of the caller's keeps all samples.
    is_given = any(kwargs.get(name) is not None for name in row.cache_arguments)
    note = None if is_given else own.rows.note_ended
    found = _with_forward(inner, own, device, note, row).generate(*given, **moved)
    home = _device_of((args, kwargs))
    return rp_batch.map_leaves(lambda leaf: leaf.to(home) if isinstance(leaf, torch.Tensor) else leaf, found)


# What the loop is given for itself, and hands to forward, too, which has no use for it.
_OF_THE_LOOP = frozenset({"tokenizer", "assistant_tokenizer"})


class _Forward:
    """A forward that computes all logits where a model slices between its layers what only the last ones need.

    `is_guided`: the loop calls it a second time for each token, without the prompt (``guidance_scale``).
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        model: nn.Module,
        row: GeneratingLayers,
        divided: DividesCaches,
        make_room: Callable[[float, float], None],
        *,
        is_guided: bool,
    ) -> None:
        self._forward = forward
        self._model = model
        self._is_guided = is_guided
        # Of the loop's own cache.
        self._cache_kind: type[Any] | None = None
        self._caches = row.cache_arguments
        self._row = row
        self._divided = divided
        self.rows = FewerRows(row, make_room)
        self._keeps_all = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. The loop reads the last position's logits."""
        unused = _OF_THE_LOOP | _without_pixels(self._row, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in unused}
        if kwargs.get("use_cache") and all(kwargs.get(name) is None for name in self._caches):
            kwargs[self._caches[0]] = self._own_cache()
        elif self._cache_kind is None:
            given: list[Any] = [kwargs[name] for name in self._caches if kwargs.get(name) is not None]
            self._cache_kind = cast("type[Any]", type(given[0])) if given else None
        chosen = self.rows.of_call(args, kwargs)
        self._divided.divide(args, chosen.kwargs, is_by_sample=chosen.kwargs is not kwargs)
        return chosen.whole(self._computed(args, chosen.kwargs))

    def _own_cache(self) -> Any:
        """The cache that the model's own forward makes if it is given none, where that is one like the loop's."""
        if not self._is_guided or self._cache_kind is None:
            # The loop would give the next token alone to a forward that has forgotten those before it.
            raise ValueError(
                f"{type(self._model).__name__} makes a key-value cache of its own in forward, which a row of "
                "layers does not; generate with use_cache=False, or on the host with the model that was wrapped"
            )
        if self._cache_kind.__name__ != "DynamicCache":
            raise ValueError(
                "guidance_scale calls forward without the prompt, too, for which the model's own makes a "
                f"DynamicCache, but the prompt's is a {self._cache_kind.__name__}; leave cache_implementation "
                "out, or generate with use_cache=False"
            )
        config: Any = self._model.config
        return self._cache_kind(config=config.get_text_config(decoder=True))

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._keeps_all:
            return self._run(args, {**kwargs, "logits_to_keep": 0})
        before = self._lengths(kwargs)
        try:
            return self._run(args, kwargs)
        except NotImplementedError:
            # As Gemma 4 is refused, whose last layers share keys. Only if no layer has run: another run would
            # write the cache once more.
            if not kwargs.get("logits_to_keep") or None in before or self._lengths(kwargs) != before:
                raise
        self._keeps_all = True
        return self._computed(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # In training mode a call draws its seed from the generator that the loop samples tokens from.
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            return self._forward(*args, **kwargs)

    def _lengths(self, kwargs: Mapping[str, Any]) -> list[int | None]:
        """The number of tokens in each cache that is given; None if it does not tell."""
        return [_length(kwargs[name]) for name in self._caches if kwargs.get(name) is not None]


def _without_pixels(row: GeneratingLayers, kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that describe images which are not given: the loop keeps them after the prompt's call."""
    given = [kwargs[name] for name in row.image_arguments if kwargs.get(name) is not None]
    has_pixels = any(torch.is_tensor(value) and value.is_floating_point() for value in given)
    return frozenset() if has_pixels else frozenset(row.image_arguments)


def _length(cache: Any) -> int | None:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        # Those of recurrent layers alone have none.
        return None


def _setting(model: Any, kwargs: Mapping[str, Any], name: str, default: float) -> Any:
    """What the loop takes a number for: an argument, one of a config, or the model's own."""
    given = (
        kwargs,
        _settings(kwargs.get("generation_config")),
        _settings(getattr(model, "generation_config", None)),
    )
    return next((config[name] for config in given if config.get(name) is not None), default)


def _by_name(model: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of `generate` that are given by their place, such as its config."""
    return dict(zip(inspect.signature(model.generate).parameters, args, strict=False))


def _refuse_encoder(model: Any) -> None:
    # The loop would run the encoder as a module, on the host, and then wants a forward without it.
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder: generate runs the encoder once and then the "
            "decoder alone, but a row of layers runs both; generate on the host, after synchronize(), with "
            "original_model.generate(...), or wrap with use_sequential_preset=False"
        )


def _refuse_early_exit(model: Any, kwargs: Mapping[str, Any]) -> None:
    # It writes another number of layers into the model's config for each draft; an error meanwhile would leave it.
    if _setting(model, kwargs, "assistant_early_exit", 0):
        raise ValueError(
            "assistant_early_exit drafts with the model's first layers alone, but a row of layers runs all; leave "
            "it out, or give an assistant_model or prompt_lookup_num_tokens"
        )


def _settings(config: Any) -> Mapping[str, Any]:
    return {} if config is None else cast("dict[str, Any]", vars(config))


def _device_of(arguments: Any) -> torch.device:
    tensors = (leaf for leaf in rp_batch.flatten(arguments)[0] if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _inner(model: nn.Module) -> nn.Module:
    """The model inside PEFT's, which has its adapters; other models are it themselves."""
    if not hasattr(model, "get_base_model"):
        return model
    peft: Any = model
    if peft.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"generate needs adapters in layers, but {type(peft.active_peft_config).__name__} learns a prompt, "
            "which PEFT puts before the input; call generate of the model that was wrapped, on the host"
        )
    return cast("nn.Module", peft.get_base_model())


def _with_forward(
    model: nn.Module,
    forward: Callable[..., Any],
    device: torch.device,
    note: Callable[[torch.Tensor], None] | None,
    row: GeneratingLayers,
) -> Any:
    """A shallow copy of a model that says it is on `device`, and whose forward is another one.

    `note`: is told which samples have ended, if it is given. `row`: what forward runs.
    """
    # Any: forwards have parameters of their own, which `generate` reads.
    kind: Any = type(model)
    own: Any = kind.forward
    own_expand: Any = inspect.getattr_static(kind, "_expand_inputs_for_generation", None)

    @wraps(own)
    def run(self: object, *args: Any, **kwargs: Any) -> Any:
        del self
        return forward(*args, **kwargs)

    def sample(self: object, *args: Any, **kwargs: Any) -> Any:
        return kind._sample(self, *args, **(kwargs if note is None else recorded(kwargs, note)))

    def expanded(self: object, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        others, images = (kwargs, {}) if expand_size == 1 else _with_images_repeated(row, expand_size, kwargs)
        # A static method or one of the object, as the version and the model have it.
        ids, found = own_expand.__get__(self, kind)(expand_size, *args, **others)
        return ids, found | images

    copied = copy.copy(model)
    vars(copied).pop("forward", None)
    body: dict[str, Any] = {
        "forward": run,
        "_sample": sample,
        # Of those who take them, the loop would run the towers by itself, on the host.
        "_supports_mm_encoder_outputs": _no,
        "_expand_inputs_for_generation": expanded,
        "device": property(lambda self: device),  # noqa: ARG005
        "__module__": kind.__module__,
    }
    copied.__class__ = type(kind.__name__, (kind,), body)
    return copied


def _no(self: object) -> bool:
    del self
    return False


def _with_images_repeated(
    row: GeneratingLayers, times: int, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a call's arguments without images, and the images, those of each sample so many times.

    The loop repeats the entries of each tensor's first dimension, which may be patches.
    """
    arguments = BySamples(row, kwargs)
    if not arguments.images:
        return kwargs, {}
    num_samples = len(next(iter(arguments.images.values())))
    samples = torch.arange(num_samples).repeat_interleave(times)
    others = {name: value for name, value in kwargs.items() if name not in arguments.images}
    return others, arguments.images_of(samples)
