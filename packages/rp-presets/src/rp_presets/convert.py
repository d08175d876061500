"""Convert a model to a row of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from rp_presets.caches.parts import choose, in_parts, sizes_of, tells_samples
from rp_presets.errors import ComputesBetween, NotARow, UnsupportedModel
from rp_presets.images.belonging import BySample, Images, Unseen, WithVideos
from rp_presets.images.examples import Example, both, examples, takes_images, video_examples
from rp_presets.images.growing import Path, growing_lists, lists_in, num_samples, whole_and_part
from rp_presets.images.proof import prove_belonging
from rp_presets.losses import OwnLosses
from rp_presets.observing.candidates import lists_of_layers, spine_of
from rp_presets.observing.imagined import own_losses
from rp_presets.observing.inputs import example_inputs as inputs_for
from rp_presets.observing.proof import proven
from rp_presets.observing.trace import LayersSeen, Trace, undisturbed
from rp_presets.rows.arguments import CACHES, names_of
from rp_presets.rows.capture import Hooks
from rp_presets.rows.glue import Epilogue, Interlude, Prologue
from rp_presets.rows.layer import Layer
from rp_presets.rows.layout import RowLayout, together
from rp_presets.rows.skeleton import children_of
from rp_presets.tracing import hide_from_other_threads

# Each division has the code around the layers run once more in each call, and the model observed once more.
_MOST_CUTS = 12

Belonging: TypeAlias = Images | BySample | WithVideos | Unseen


class LayerRow(nn.Sequential):
    """A model's layers. `own_loss`: how the model's own loss over a batch follows from the losses of its parts.

    `whole_arguments`: names of arguments that every part of a split batch gets as a whole. `main_arguments`: names
    of arguments whose first dimension is the batch, even if other arguments have another first dimension.
    `cache_arguments`: names of arguments that hold a key-value cache, which layers write. `cache_in_parts`,
    `cache_sizes`: divide one by samples, and say how one is divided. `cache_tells_samples`: whether that can be
    done. `choose_in_cache`: lets one hold other samples of those that it has. `growing_lists`: paths of lists in
    the output that have an entry for each "image" or "sample".
    """

    cache_arguments = CACHES
    cache_in_parts = staticmethod(in_parts)
    cache_sizes = staticmethod(sizes_of)
    cache_tells_samples = staticmethod(tells_samples)
    choose_in_cache = staticmethod(choose)

    # Transformers defines the first as a number of positions, or their indices, and the other as such indices.
    whole_arguments = frozenset({"logits_to_keep", "cache_position"})
    # In a batch without padding these have one row, while `cu_seq_lens_q` has one entry per sequence.
    main_arguments = ("input_ids", "inputs_embeds")

    def __init__(
        self,
        layers: Sequence[nn.Module],
        own_loss: OwnLosses,
        images: Belonging,
        growing: Mapping[Path, str] | None = None,
    ) -> None:
        super().__init__(*layers)
        self.own_loss = own_loss
        self._images = images
        self.growing_lists = dict(growing or {})
        # Set the flag of the wrappers only: the model's modules inside may have different flags.
        for module in (self, *layers):
            module.training = layers[0].training

    @property
    def image_arguments(self) -> tuple[str, ...]:
        """Names of the arguments that hold images, or describe them; empty if it takes none."""
        return self._images.names

    @property
    def has_images_or_videos(self) -> bool:
        """Whether no call may have both images and videos, since they fill the same placeholders."""
        return isinstance(self._images, WithVideos) and self._images.are_apart

    @property
    def refuses_images(self) -> str:
        """Why it takes no images, though its model does; empty otherwise."""
        return self._images.reason if isinstance(self._images, Unseen) else ""

    def entries_of_samples(self, arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
        """Return how many entries each sample has, by name of the arguments of a call that hold images.

        Raises `ValueError` if images and their placeholders disagree; `UnsupportedModel` if the row takes none.
        """
        return self._images.entries(arguments)

    def used_by_samples(self, arguments: Mapping[str, Any]) -> Mapping[str, tuple[bool, ...]]:
        """Return whether each sample has images, by name of the arguments that hold padding for one without any.

        Raises `ValueError` for a sample with an image that has no placeholder.
        """
        return self._images.used(arguments) if isinstance(self._images, BySample | WithVideos) else {}

    def sample_dimensions(self, arguments: Mapping[str, Any]) -> Mapping[str, int]:
        """Return which dimension is the batch, by name of the arguments of a call in which it is not the first."""
        found = {name: dim for name, dim in self._images.dims.items() if isinstance(arguments.get(name), Tensor)}
        positions = arguments.get("position_ids")
        main = next((one for name in self.main_arguments if isinstance(one := arguments.get(name), Tensor)), None)
        if not isinstance(positions, Tensor) or main is None:
            return found
        # Time, height and width of each token, as of M-RoPE.
        has_kinds = positions.ndim == 3 and positions.shape[1] == len(main)
        return {**found, "position_ids": 1} if has_kinds else found

    def __getitem__(self, idx: slice | int) -> Any:
        """Return a layer, or a slice of layers as an `nn.Sequential`, since part of a row has no own loss."""
        layers = list(self)
        return nn.Sequential(*layers[idx]) if isinstance(idx, slice) else layers[idx]


def to_sequential(model: nn.Module, *, example_inputs: Mapping[str, Any] | None = None) -> LayerRow:
    """Convert a model to a row of layers that contains the model's modules and computes the same outputs.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ... )
    >>> model = Qwen3ForCausalLM(config)
    >>> row = to_sequential(model)
    >>> [type(layer).__name__ for layer in row]
    ['Prologue', 'Layer', 'Layer', 'Epilogue']
    >>> row[1].layer is model.model.layers[0]
    True

    The first layer takes the arguments of the model's forward, every other layer takes the result of the layer
    before, and the last one returns the model's output object. No parameter is copied: training the row trains the
    model, and tied weights stay tied.

    No family is known by name. The model's own forward is run on a few tokens while its layers are observed, one
    of each kind of layer is run, and the code around the layers is run alone. The model is a row if that code
    computes nothing from a layer's result before the last layer has run, and needs nothing that the row does not
    pass to it.

    Args:
        model: any model whose layers are in lists of modules, with or without PEFT adapters.
        example_inputs: arguments of forward to observe it with; by default a few tokens, pixels or sound samples,
            made from the model's config. Modules that these do not reach, such as a vision tower, are not in the
            row.

    Raises:
        TypeError: the model is not a torch module.
        UnsupportedModel: the model is not a row of layers; the message says where.
        ValueError: the model has a setting that the row does not support; the message says what to do.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise TypeError(f"model must be a torch.nn.Module, but is a {type(model).__name__}")
    lists = lists_of_layers(model)
    if not lists:
        raise UnsupportedModel(f"{type(model).__name__} has no list of layers (nn.ModuleList)")
    _refuse_settings(model)
    hide_from_other_threads()
    hooks = Hooks(model)
    with undisturbed(model), torch.no_grad():
        model.train()
        inputs = dict(example_inputs or inputs_for(model))
        layout, seen = _layout(model, lists, [inputs], hooks)
        images: Belonging = BySample(())
        growing: dict[Path, str] = {}
        if not example_inputs and takes_images(model):
            layout, seen, images, growing = _with_images(model, lists, layout, seen, inputs, hooks)
        elif example_inputs and takes_images(model):
            growing = _growing(model, layout, *whole_and_part(inputs), hooks)
    hooks.is_converted = True
    return LayerRow(_row(model, layout), own_losses(model, layout, seen, inputs), images, growing)


def _with_images(
    model: nn.Module,
    lists: Mapping[str, nn.ModuleList],
    layout: RowLayout,
    seen: list[LayersSeen],
    inputs: dict[str, Any],
    hooks: Hooks,
) -> tuple[RowLayout, list[LayersSeen], Belonging, dict[Path, str]]:
    """Observe the model with images, too. Its towers count as code before the layers, since samples may have none.

    What was observed without images stays if it is no row with them.
    """
    own = {segment.path: lists[segment.path] for segment in layout.segments}
    reasons: list[str] = []
    try:
        for number, example in enumerate(examples(model)):
            # With videos at once: what is proven of a call is proven again where there are more.
            if not number and (found := _with_videos(model, own, inputs, example, hooks)):
                return found
            try:
                both_layout, both_seen = _layout(model, own, [inputs, example.arguments], hooks)
                prove_belonging(model, both_layout, example)
                growing = _growing(model, both_layout, example.arguments, example.of_sample(0), hooks)
            except Exception as error:  # the model's own code raises anything
                reasons.append(str(error))
            else:
                found = _with_videos(model, own, inputs, example, hooks) if number else None
                return found or (both_layout, both_seen, example.images, growing)
    except Exception as error:  # the model's own code raises anything
        reasons.append(str(error))
    return layout, seen, Unseen("; ".join(dict.fromkeys(reasons))), {}


def _with_videos(
    model: nn.Module, own: Mapping[str, nn.ModuleList], inputs: dict[str, Any], example: Example, hooks: Hooks
) -> tuple[RowLayout, list[LayersSeen], Belonging, dict[Path, str]] | None:
    """Observe the model with videos, too, and with both in one call, if any; None if it is no row with them."""
    for video in video_examples(model):
        belonging = WithVideos(example.images, cast(Images, video.images))
        beside = [] if belonging.are_apart else [both(example, video)]
        calls = [example.arguments, video.arguments, *beside]
        try:
            layout, seen = _layout(model, own, [inputs, *calls], hooks)
            prove_belonging(model, layout, example)
            prove_belonging(model, layout, video)
            parts = [example.of_sample(0), video.of_sample(0)]
            found = [_growing(model, layout, *each, hooks) for each in zip(calls, parts, strict=False)]
        except Exception:  # the model's own code raises anything
            continue
        return layout, seen, belonging, found[0] | found[1]
    return None


def _growing(
    model: nn.Module, layout: RowLayout, whole: dict[str, Any], part: dict[str, Any], hooks: Hooks
) -> dict[Path, str]:
    """Find the lists in the output that have an entry for each image or sample. `part`: fewer of these samples."""
    cuts = {path: [start for start, _ in places if start] for path, places in layout.starts().items()}
    try:
        output = _run(model, cuts, whole, hooks)[1]
    except Exception:  # the model's own code raises anything
        # One sample, which was given, is no batch of two where its images are not along the first dimension.
        return dict.fromkeys(lists_in(_run(model, cuts, part, hooks)[1]), "unknown")
    if not (found := dict.fromkeys(lists_in(output), "unknown")):
        return {}
    try:
        fewer = _run(model, cuts, part, hooks)[1]
    except Exception:  # the model's own code raises anything
        return found
    return growing_lists(output, fewer, (num_samples(whole), num_samples(part)))


def _layout(
    model: nn.Module, lists: Mapping[str, nn.ModuleList], calls: Sequence[dict[str, Any]], hooks: Hooks
) -> tuple[RowLayout, list[LayersSeen]]:
    """Observe the model in calls with these arguments; return what was seen in the first.

    Lists that are not rows, except the largest, count as code around the others.

    Lists are divided where the model computes between their layers.
    """
    refused: dict[str, str] = {}
    cuts: dict[str, set[int]] = {path: set() for path in lists}
    while True:
        chosen = {path: sorted(cuts[path]) for path in lists if path not in refused}
        try:
            return _observed(model, chosen, calls, hooks)
        except ComputesBetween as error:
            cuts[error.path].add(error.index)
            if len(cuts[error.path]) > _MOST_CUTS:
                raise
        except NotARow as error:
            refused[error.path] = error.reason
            if error.path == next(iter(lists)):
                raise
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be observed: {type(error).__name__}: {error}"
            ) from error


def _observed(
    model: nn.Module, chosen: Mapping[str, Sequence[int]], calls: Sequence[dict[str, Any]], hooks: Hooks
) -> tuple[RowLayout, list[LayersSeen]]:
    cache = _takes_cache(model, spine_of(chosen))
    traces = [_run(model, chosen, inputs, hooks)[0] for inputs in calls]
    layouts = [trace.layout(cache_argument=cache) for trace in traces]
    if not layouts[0].segments:
        raise UnsupportedModel(f"{type(model).__name__} called none of its lists of layers: {', '.join(chosen)}")
    layout = together(layouts)
    for trace, inputs in zip(traces, calls, strict=True):
        layout = proven(model, layout, trace.seen(), inputs)
    return layout, traces[0].seen()


def _run(
    model: nn.Module, chosen: Mapping[str, Sequence[int]], inputs: dict[str, Any], hooks: Hooks
) -> tuple[Trace, Any]:
    """Observe one call; return its trace and output."""
    trace = Trace(model, chosen, spine_of(chosen), hooks)
    cache = _takes_cache(model, spine_of(chosen))
    return trace, trace.run((), {**inputs, **({"use_cache": False} if cache else {})})


def _takes_cache(model: nn.Module, spine: frozenset[str]) -> bool:
    """Return whether forward takes `use_cache`, which some models pass on in `**kwargs`."""
    inner = cast(nn.Module, getattr(model, "get_base_model", lambda: model)())
    around = [model.get_submodule(path) for path in spine]
    return "use_cache" in names_of(inner) or (
        "kwargs" in names_of(inner) and any("use_cache" in names_of(module) for module in around)
    )


def _row(model: nn.Module, layout: RowLayout) -> list[nn.Module]:
    layers: list[nn.Module] = [Prologue(model, layout)]
    for number, segment in enumerate(layout.segments):
        if number:
            layers.append(Interlude(model, layout, number))
        own = list(children_of(model.get_submodule(segment.path)).values())[segment.start : segment.stop]
        layers += [Layer(layer, index, layout) for index, layer in enumerate(own)]
    return [*layers, Epilogue(model, layout)]


def _refuse_settings(model: nn.Module) -> None:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "gradient checkpointing must be off, but is on: the engine recomputes layers itself; "
            "call model.gradient_checkpointing_disable() first"
        )
    for name, value in _drops_layers(model):
        raise ValueError(
            f"{name} must be 0, but is {value}: a row runs all its layers and skips none at random; set it to 0 "
            "in the config that the model is made from"
        )


def _drops_layers(model: nn.Module) -> Iterator[tuple[str, float]]:
    for module in model.modules():
        for name, value in vars(module).items():
            if "layerdrop" in name.lower() and isinstance(value, float | int) and value > 0:
                yield f"{type(module).__name__}.{name}", value
