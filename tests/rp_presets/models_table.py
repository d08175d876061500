"""The tables of docs/models.md: what becomes of every class of the installed transformers that makes text."""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import dataclass

import transformers
from comparison import without_dropout
from families import TRAINING_ONLY, UNBUILDABLE, Family, causal_families
from rp_presets import UnsupportedModel, to_sequential
from seeing import NOT_BUILT, seeing_families

# Families that are no row, with what the error says.
IS_NO_ROW: dict[str, str] = {
    "HrmTextForCausalLM": "layer 0 is called without gradients",
    "ReformerModelWithLMHead": "called without gradients, or in an autograd function",
    "XLMWithLMHeadModel": "layer 1 is called out of turn",
}

# Families that do not train taken apart, in microbatches at least, with what the error says. Each has its reason.
WHOLE_ONLY: dict[str, str] = {
    # Layers hand each other keys and values in one dict.
    "Gemma3nForCausalLM": "writes into a KVSharingDict",
    "Gemma4ForCausalLM": "writes into a KVSharingDict",
    "Gemma4ForConditionalGeneration": "writes into a KVSharingDict",
    "Gemma4UnifiedForCausalLM": "writes into a KVSharingDict",
    "Gemma4UnifiedForConditionalGeneration": "writes into a KVSharingDict",
    # The model always makes a cache.
    "XLMWithLMHeadModel": "key-value cache",
}

# Rows that take no images beside tokens, and why.
OTHERWISE: dict[str, str] = {
    "EvollaForProteinText2Text": "it reads proteins, not images",
    "Kosmos2_5ForConditionalGeneration": "it takes flattened_patches, not pixel_values",
    "VisionEncoderDecoderModel": "an encoder-decoder, whose samples are images: pixel_values, one a sample",
}


@dataclass(frozen=True)
class Line:
    """What becomes of one class, and why if it is no row."""

    name: str
    becomes: str
    reason: str

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.becomes} | {self.reason.replace('|', '/')} |"


def line(family: Family) -> Line:
    """Build a tiny model of the family, and convert it."""
    if family.name in UNBUILDABLE:
        return Line(family.name, "not built", UNBUILDABLE[family.name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = without_dropout(family.build())
    try:
        to_sequential(model)
    except UnsupportedModel as error:
        return Line(family.name, "taken apart", str(error))
    note = TRAINING_ONLY.get(family.name, "")
    return Line(family.name, "row", f"in training mode: {note}" if note else "")


def seeing_line(family: Family) -> Line:
    """Build a tiny model of a family that reads images, and convert it."""
    if family.name in NOT_BUILT:
        return Line(family.name, "not built", NOT_BUILT[family.name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = without_dropout(family.build())
    try:
        row = to_sequential(model)
        refused = row.refuses_images or OTHERWISE.get(family.name, "")
    except UnsupportedModel as error:
        return Line(family.name, "taken apart", brief(error))
    if refused:
        return Line(family.name, "row for tokens", brief(refused))
    return Line(family.name, "row", WITH_VIDEOS if "pixel_values_videos" in row.image_arguments else "")


def brief(reason: object) -> str:
    """The first reason of several, in one line."""
    first = str(reason).split(";")[0].split(": pixel_values")[0]
    return " ".join(first.split())


def seeing_table() -> str:
    """The part of the document about models that read images."""
    lines = [seeing_line(family) for family in seeing_families().values()]
    kinds = ("row", "row for tokens", "taken apart", "not built")
    counts = {kind.replace(" ", "_"): sum(one.becomes == kind for one in lines) for kind in kinds}
    videos = sum(one.reason == WITH_VIDEOS for one in lines)
    return SEEING.format(count=len(lines), videos=videos, **counts) + "\n".join(map(str, lines)) + "\n"


def table() -> str:
    """The whole document."""
    return causal_table() + seeing_table()


def causal_table() -> str:
    """The part of the document about causal language models."""
    lines = [line(family) for family in causal_families().values()]
    counts = {kind: sum(one.becomes == kind for one in lines) for kind in ("row", "taken apart", "not built")}
    return (
        HEAD.format(
            version=transformers.__version__,
            count=len(lines),
            whole_only=textwrap.fill(", ".join(f"`{name}`" for name in sorted(WHOLE_ONLY)), 118),
            last_run=LAST_RUN,
            **{kind.replace(" ", "_"): number for kind, number in counts.items()},
        )
        + "\n".join(map(str, lines))
        + "\n"
    )


WITH_VIDEOS = "videos, too"
LAST_RUN = """\
The last run of all of them was on 2026-11-24, with torch 2.15 on two busy cores. It took 8 minutes: 715 passed,
and 9 were skipped because transformers itself cannot train the model on that batch."""

HEAD = """\
# Causal language models of transformers {version}

The table lists the {count} classes of `AutoModelForCausalLM`. `scripts/models-table` generates it by passing a
tiny model of each class, with random weights, to `rp_presets.to_sequential`.

- **row** ({row} classes): the model becomes an `nn.Sequential` of its layers and trains with `forward_backward`.
- **taken apart** ({taken_apart} classes): its layers do not form a row, for the reason given.
  `wrap_model_to_roundpipe` runs its modules one by one.
- **not built** ({not_built} classes): transformers itself cannot build or run the model here.

Any class can also be taken apart, except the following. They raise an error, since one of their modules cannot be
split into microbatches:
{whole_only}.

`tests/rp_presets/test_families.py` compares logits, loss and every gradient of each row with those of the original
model, with and without padding, positions and ignored labels. `tests/rp_presets/test_families_on_devices.py`
trains each class with the engine on CPU devices in three microbatches, as a row and taken apart, and compares loss
and gradients again. `tests/rp_presets/test_taken_apart.py` takes each class apart to its smallest modules, with
more tokens than sequences and with as many.

Every test run covers a few families. `pytest -m nightly tests/rp_presets` covers all of them.
{last_run}

| class | becomes | reason |
|---|---|---|
"""

SEEING = """\

## Models that read images

The table lists the {count} classes of `AutoModelForImageTextToText`, made in the same way.

- **row** ({row} classes): the model becomes a row that takes images, in any number of microbatches and with any
  number of images a sample. Its tower runs before the layers; code between two layers, such as that which adds
  deep-stack features, is a layer of the row of its own. {videos} of them take videos in the same way, alone and
  beside images, but those of GLM in calls without images: both have the same placeholders there.
- **row for tokens** ({row_for_tokens} classes): a row as long as no images are given, for the reason given.
- **taken apart** ({taken_apart} classes): it cannot be observed without images, or its layers do not form a row.
- **not built** ({not_built} classes): transformers itself cannot build or run the model here.

`tests/rp_presets/test_seeing.py` compares logits, loss and every gradient of each row with those of the original
model, with images, without, and with both in one batch. `tests/rp_presets/test_seeing_on_devices.py` trains each
with the engine on one, two and four CPU devices, in one to three microbatches, with ragged numbers of images and
of videos.
Every test run covers a few, `pytest -m nightly` all.

| class | becomes | reason |
|---|---|---|
"""
