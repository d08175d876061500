"""The command `roundpipe merge`: write a model with its adapter merged into its weights."""

from __future__ import annotations

import rp_export
from rp_data.chat.reply_ends import ReplyEnds
from rp_export import ExportedModel
from rp_export.folder import check_output
from rp_export.pushing import check_push
from rp_sources.sources import source_of
from rp_trainer.errors import Refused

from rp_cli.finetune.model import without_bars
from rp_cli.merging.options import MergeOptions, Merging
from rp_cli.merging.recipe import recipe_of

_NEAREST = (
    "in {dtypes}: sums are fp32 and rounded once, to the nearest; PEFT's merge of stacked experts, and its "
    "safe_merge, round the adapter's part first, so that last bits differ"
)


def merge(options: MergeOptions) -> None:
    """Merge an adapter into its model, and write the result. Raises `Refused`, `Unwritable`."""
    check_output(options.output)
    check_push(options.push)
    source = source_of(options)
    if source.adapter is None:
        raise Refused(
            f"{options.run} holds a whole model, so there is nothing to merge; `roundpipe export` writes it in "
            "other formats"
        )
    without_bars()
    ends = ReplyEnds.of(source)
    whole = rp_export.merge(
        source, options.output, unrounded=options.unrounded, options=recipe_of(source), ends=ends
    )
    _tell(options, whole)
    print(ends.told(whole.ends), end="")
    push(options)


def tell_unused(whole: ExportedModel | None) -> None:
    """Print what of the model's files is not in the model."""
    for one in () if whole is None else whole.unused:
        print(f"not used: {one}")


def push(options: Merging) -> None:
    """Upload what was made, if that is asked for."""
    if options.push is not None:
        print(f"pushed to {rp_export.push(options.output, options.push, private=options.private)}", flush=True)


def _tell(options: MergeOptions, whole: ExportedModel) -> None:
    tell_unused(whole)
    print(f"merged: {whole.adapter} into {whole.changed} of {whole.weights} weights, {_told(whole)}")
    if whole.is_rounded:
        print("merged into the weights as the run had packed them; --unrounded takes those of the model's files")
    print(f"written to {options.output}, which transformers loads", flush=True)


def _told(whole: ExportedModel) -> str:
    if whole.dtypes == ("float32",):
        return "in fp32, as PEFT's own merge does"
    return _NEAREST.format(dtypes=" or ".join(whole.dtypes))
