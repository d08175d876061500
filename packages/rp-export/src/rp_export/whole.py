"""A whole model in a folder: that of a run, with its adapter merged and packed weights expanded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from rp_adapters.vocabulary import grown_for
from rp_presets import DamagedFile, Streamed, streamed, unasked
from rp_sources.sources import Source, has_tokenizer
from rp_strangers.code import told
from rp_strangers.refusing import refusing

from rp_export.adapter import Adapter
from rp_export.weights import NOT_PACKED, BaseWeights, HeldPacking, MergedWeights
from rp_export.writing import TextEnds, copy_beside, write_ends, write_model


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What was written. `adapter`: the kind of the adapter, empty for none. `dtypes`: of the weights.

    `is_rounded`: whether weights that the run had packed are as it had them. `unused`: what is in the model's
    files, but not in the model, in words. `ends`: tokens that end its text, of which its model's config did not
    know.
    """

    weights: int
    changed: int
    adapter: str
    dtypes: tuple[str, ...]
    is_rounded: bool
    unused: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()


def write_whole(folder: Path, source: Source, *, is_rounded: bool, ends: TextEnds | None = None) -> ExportedModel:
    """Write the model of a source with its adapter, its tokenizer and what else belongs to it.

    `is_rounded`: weights that the run had packed are as it had them. `ends`: of the tokens that end text by the
    model's generation config, makes those that do; None: they stay.

    Raises `Refused` for what cannot be merged, `OSError` for what cannot be written.
    """
    with (
        warnings.catch_warnings(),
        refusing(f"{source.model} cannot be loaded: ", (ValueError, OSError), told),
        refusing("", (DamagedFile,)),
        unasked(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        found = streamed(source.model)
    packing = _packing(found, source) if is_rounded else NOT_PACKED
    base = BaseWeights(found, packing)
    adapter = None if source.adapter is None else _adapter(found, source.adapter)
    weights = MergedWeights(found.model, base, adapter)
    weights.check(source.model)
    write_model(folder, found.model, weights)
    copy_beside(folder, source.model, next((each for each in source.tokenizers if has_tokenizer(each)), None))
    return ExportedModel(
        len(weights.names),
        sum(weights.is_changed(name) for name in weights.names),
        "" if adapter is None else adapter.kind,
        tuple(sorted({str(weights.dtype(name)).removeprefix("torch.") for name in weights.names})),
        packing is not NOT_PACKED,
        tuple(
            f"{name} of {source.model}, which a {type(found.model).__name__} does not have"
            for name in found.unused
        ),
        () if ends is None else write_ends(folder, ends),
    )


def _packing(found: Streamed, source: Source) -> HeldPacking:
    """Return how the run of an adapter packed its model."""
    if source.packing is None:
        return NOT_PACKED
    dtype = getattr(torch, str(source.recipe.get("dtype", "bfloat16")))
    return HeldPacking.of(found.model, source.packing, dtype)


def _adapter(found: Streamed, folder: Path) -> Adapter:
    """Build the adapter, on embeddings that are as large as those that it has."""
    return Adapter(grown_for(found.model, folder), folder)
