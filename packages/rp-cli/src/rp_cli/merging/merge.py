"""The command `roundpipe merge`: write a model with its adapter merged into its weights."""

from __future__ import annotations

from rp_trainer.errors import Refused

from rp_cli.merging.card import Made, write_card
from rp_cli.merging.folder import made_whole
from rp_cli.merging.options import MergeOptions
from rp_cli.merging.pushing import check_push, push
from rp_cli.merging.whole import Whole, check_output, write_whole
from rp_cli.runs.sources import source_of

_NEAREST = (
    "in {dtypes}: sums are fp32 and rounded once, to the nearest; PEFT's merge of stacked experts, and its "
    "safe_merge, round the adapter's part first, so that last bits differ"
)


def merge(options: MergeOptions) -> None:
    """Merge an adapter into its model, and write the result. Raises `Refused`, `Unwritable`."""
    check_output(options.output)
    check_push(options)
    source = source_of(options)
    if source.adapter is None:
        raise Refused(
            f"{options.run} holds a whole model, so there is nothing to merge; `roundpipe export` writes it in "
            "other formats"
        )
    with made_whole(options.output) as folder:
        whole = write_whole(folder, source, is_rounded=not options.unrounded)
        write_card(folder, Made("merged", source, whole))
    _tell(options, whole)
    push(options)


def _tell(options: MergeOptions, whole: Whole) -> None:
    print(f"merged: {whole.adapter} into {whole.changed} of {whole.weights} weights, {_told(whole)}")
    if whole.is_rounded:
        print("merged into the weights as the run had packed them; --unrounded takes those of the model's files")
    print(f"written to {options.output}, which transformers loads", flush=True)


def _told(whole: Whole) -> str:
    if whole.dtypes == ("float32",):
        return "in fp32, as PEFT's own merge does"
    return _NEAREST.format(dtypes=" or ".join(whole.dtypes))
