"""The data of a fine-tuning: read, held out, and in batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from rp_data.batching.ahead import Ahead
from rp_data.batching.batches import Sequences, StepBatches
from rp_data.batching.collating import Collator, collator_of
from rp_data.documents import Document, Documents, held_out, repeats
from rp_data.gathered import Gathered
from rp_data.images.pictures import Spool
from rp_data.images.processor import Sight
from rp_data.library import library_source
from rp_data.reading import Eyes, Manner, check_some, read_all
from rp_trainer.errors import Refused
from rp_trainer.finetuning import Evaluation
from torch import Tensor

from rp_cli.finetune.model import config_file, loader_of, pad_of, placeholders_in, sight_for
from rp_cli.finetune.options import FineTuning


@dataclass(frozen=True, slots=True)
class Data:
    """The data to train on and to evaluate on.

    `digest`: of all data. `steps`: of the whole training. `clock`: the time that chat templates saw. `notes`: what
    else users are told of it. `sight`: what reads its images, if it has some.
    """

    training: Documents
    batches: StepBatches | Ahead
    evaluation: Evaluation | None
    sequences: Sequences
    digest: str
    steps: int
    clock: datetime
    notes: Sequence[str]
    sight: Sight | None = None

    def images(self, placeholders: Collection[int]) -> tuple[int, int, int]:
        """Return how many images the data to train on has, how many tokens they take, and its samples."""
        seen = [one for one in self.training.all if one.seen is not None]
        tokens = sum(one.tokens.count(placeholder) for one in seen for placeholder in placeholders)
        return sum(len(one.seen.pictures) for one in seen if one.seen), tokens, len(self.training.all)

    def with_images(self, pad: int, rows: int) -> tuple[str, dict[str, Tensor]] | None:
        """Return the place of the first image to train on, and a call's arguments with its row so many times.

        And with the row of the first video, if there is one.
        """
        found = [first for kind in (False, True) if (first := self._first(is_video=kind)) is not None]
        if not found:
            return None
        place, _ = found[0]
        return place, self.sequences.of([[document] for _, document in found] * rows, pad)

    def _first(self, *, is_video: bool) -> tuple[str, Document] | None:
        """Return the first document with an image, or with a video, and the place of that."""
        shown = ((one, picture) for one in self.training.all if one.seen for picture in one.seen.pictures)
        return next(((one.place, document) for document, one in shown if (one.video >= 0) is is_video), None)


def read_data(options: FineTuning, clock: datetime) -> tuple[Any, Data]:
    """Return the tokenizer and the tokenized data."""
    given = [("--data", library_source() if options.data is None else options.data)]
    if options.eval_data is not None:
        given.append(("--eval-data", options.eval_data))
    load = loader_of(options)
    known = placeholders_in(config_file(options))
    manner = Manner(options.sequence, options.completions_only, options.skip_bad_rows, clock, known)
    # A file without a name, if memory is short, is where there is room for the results.
    gather = partial(Gathered, options.output)
    eyes = Eyes(partial(sight_for, options), Spool(options.output))
    tokenizer, _, (training, *others) = read_all(load, given, manner, gather, eyes)
    for (option, paths), documents in zip(given, (training, *others), strict=True):
        check_some(f"{option} {', '.join(map(str, paths))}", options.sequence, documents)
    collator = _collator(options, (training, *others), eyes)
    return tokenizer, _data(options, tokenizer, training, others[0] if others else None, clock, collator)


def _collator(options: FineTuning, read: Sequence[Documents], eyes: Eyes) -> Collator | None:
    """Return what adds images to batches; None if the data has none."""
    collator = collator_of(read, eyes.load, eyes.spool)
    if collator is None:
        check_not_for_images(options)
    return collator


def check_not_for_images(options: FineTuning) -> None:
    """Raise `Refused` for options of images, of which the data has none."""
    for name in ("min_pixels", "max_pixels", "image_cache"):
        if getattr(options, name) is not None:
            raise Refused(f"--{name.replace('_', '-')} is for images, but the data has none; omit it")


def _data(
    options: FineTuning,
    tokenizer: Any,
    training: Documents,
    evaluated: Documents | None,
    clock: datetime,
    collator: Collator | None,
) -> Data:
    notes = [*training.notes.lines("--data"), *(evaluated.notes.lines("--eval-data") if evaluated else ())]
    notes += repeats(training, evaluated) if options.data else ()
    if evaluated is None and options.held_out:
        training, evaluated = held_out(training, options.held_out)
    pad = pad_of(tokenizer)
    if collator is not None:
        notes.append(_about_images(options, training))
        options = replace(options, packing=False)
    sequences = _sequences(options, training, options.data_weights, collator)
    made = StepBatches(sequences, batch=options.batch, accumulation=options.accumulation, pad=pad)
    evaluation = (
        None
        if evaluated is None
        else Evaluation(_sequences(options, evaluated, collator=collator).batches(options.batch, pad))
    )
    digest = training.digest() if evaluated is None else f"{training.digest()} {evaluated.digest()}"
    batches = made if collator is None else Ahead(made)
    steps = options.steps or batches.in_epochs(options.epochs or 1)
    largest = max(training.largest, 0 if evaluated is None else evaluated.largest, pad)
    sight = None if collator is None else collator.sight
    training = replace(training, largest=largest)
    return Data(training, batches, evaluation, sequences, digest, steps, clock, notes, sight)


def _about_images(options: FineTuning, training: Documents) -> str:
    packing = "; samples are not packed, as with --no-packing, since images are not" if options.packing else ""
    shown = training.shown
    if options.image_cache is None:
        return f"{shown}, decoded for each step while the one before trains{packing}"
    kept = f"kept in {options.image_cache}, up to {options.image_cache_gb:g} GB"
    return f"{shown}; what the processor makes of {'images' if 'videos' in shown else 'them'} is {kept}{packing}"


def _sequences(
    options: FineTuning,
    documents: Documents,
    weights: Sequence[float] | None = None,
    collator: Collator | None = None,
) -> Sequences:
    return Sequences(
        documents,
        size=options.sequence,
        packing=options.packing,
        seed=options.seed,
        weights=weights,
        collator=collator,
    )


def described(options: FineTuning, data: Data) -> str:
    """Return lines on the data, and on how it is trained on."""
    documents, counts = data.training, data.training.counts
    rows = data.sequences.in_epoch
    form = "packed into" if options.packing else "in"
    filled = f", {data.sequences.filled:.0%} full" if options.packing else ""
    lines = [
        f"data: {counts.samples:,} samples; to train on, {documents.tokens:,} tokens, {documents.labels:,} of "
        f"which are learned, {form} {rows:,} sequences of {options.sequence}{filled}"
    ]
    lines += [*counts.lines(options.sequence), *data.notes]
    if not documents.has_end:
        lines.append("the tokenizer has no token for the end of a text, so texts end without one")
    epochs = data.steps * data.batches.rows / rows
    lines.append(f"{data.steps:,} steps of {data.batches.rows} sequences, {epochs:.3g} epochs")
    if options.warm_up > data.steps:
        lines.append(f"--warm-up {options.warm_up:g} takes longer than the training, which never reaches --lr")
    return "\n".join(lines)
