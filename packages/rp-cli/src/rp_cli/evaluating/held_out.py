"""The data of an evaluation: given, or what a run has held out of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rp_data.batching.batches import Sequences
from rp_data.batching.collating import collator_of
from rp_data.chat.tokenizer import loaded_tokenizer
from rp_data.documents import Documents
from rp_data.documents import held_out as divided
from rp_data.images.store import Store
from rp_data.library import library_source
from rp_data.reading import Eyes, Manner, check_some, read_all
from rp_sources.sources import Source
from rp_trainer.errors import Refused
from rp_trainer.finetuning import Evaluation

from rp_cli.evaluating.options import EvalOptions
from rp_cli.finetune.model import pad_of, placeholders_in
from rp_cli.finetune.resumed import CLOCK
from rp_cli.talking.seeing import sight_in

_SEQUENCE = 2048


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What to evaluate on. `name`: what users call it; `size`: tokens of a sequence; `learned`: that count.

    `has_images`: whether the model must read some. `is_packed`: whether documents are, as many as fit.
    """

    evaluation: Evaluation
    name: str
    size: int
    sequences: int
    tokens: int
    learned: int
    notes: Sequence[str]
    has_images: bool
    is_packed: bool


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which documents there are to be, and how they become sequences."""

    name: str
    given: Sequence[tuple[str, Sequence[Path]]]
    manner: Manner
    packing: bool
    seed: int
    part: float
    digest: str


def held_out(source: Source, options: EvalOptions) -> HeldOut:
    """Read and tokenize the data. Raises `Refused` for data that cannot be used, and for a run without any."""
    run = source.recipe
    wanted = _given(options, run) if options.data is not None else _of_run(source, options, run)
    # Rows with these are no data of the run either.
    manner = replace(wanted.manner, placeholders=placeholders_in(source.model / "config.json"))
    eyes = Eyes(
        partial(sight_in, source, Store.opener("--image-cache", options.image_cache, options.image_cache_gb))
    )
    tokenizer, _, read = read_all(partial(loaded_tokenizer, source), wanted.given, manner, eyes=eyes)
    collator = collator_of(read, eyes.load, eyes.spool)
    if collator is None and options.image_cache is not None:
        raise Refused("--image-cache is for images, but the data has none; omit it")
    documents = read[-1]
    cut = documents.counts.lines(wanted.manner.sequence)
    notes = [*cut, *documents.notes.lines(wanted.given[-1][0]), *_changed(wanted, read)]
    if wanted.part:
        _, documents = divided(documents, wanted.part)
    check_some(wanted.name, wanted.manner.sequence, documents)
    size, is_packed = wanted.manner.sequence, wanted.packing and collator is None
    sequences = Sequences(documents, size=size, packing=is_packed, seed=wanted.seed, collator=collator)
    return HeldOut(
        Evaluation(sequences.batches(options.batch, pad_of(tokenizer))),
        wanted.name,
        size,
        sequences.in_epoch,
        documents.tokens,
        documents.labels,
        notes,
        collator is not None,
        is_packed,
    )


def _given(options: EvalOptions, run: Mapping[str, Any]) -> _Wanted:
    """What the options say; for what they do not, as the run had it, if there is one."""
    assert options.data is not None
    manner = Manner(
        options.sequence or run.get("sequence", _SEQUENCE),
        options.completions_only or bool(run.get("completions_only")),
        options.skip_bad_rows,
        _clock(run),
    )
    packing = options.packing and bool(run.get("packing", True))
    name = f"--data {', '.join(map(str, options.data))}"
    return _Wanted(name, [("--data", options.data)], manner, packing, run.get("seed", 0), 0.0, "")


def _of_run(source: Source, options: EvalOptions, run: Mapping[str, Any]) -> _Wanted:
    """What the run was evaluated on."""
    part, own = float(run.get("held_out") or 0), run.get("eval_data")
    if not part and not own:
        why = "is no run of `roundpipe train`" if source.run is None else "held out no data"
        raise Refused(f"--data must be given: {options.run} {why}")
    data = library_source() if run.get("data") is None else _paths(run["data"])
    given: list[tuple[str, Sequence[Path]]] = [("--data", data)]
    if own:
        given.append(("--eval-data", _paths(own)))
    manner = Manner(
        options.sequence or run["sequence"], bool(run["completions_only"]), bool(run["skip_bad_rows"]), _clock(run)
    )
    name = f"--eval-data of {source.run}" if own else f"what {source.run} held out"
    return _Wanted(
        name, given, manner, bool(run["packing"]), run["seed"], 0.0 if own else part, run["data_digest"]
    )


def _changed(wanted: _Wanted, read: Sequence[Documents]) -> list[str]:
    """Return a warning if a run had other data: it may then have been trained on what is held out now."""
    if not wanted.digest:
        return []
    parts = divided(read[0], wanted.part) if wanted.part else read
    if " ".join(part.digest() for part in parts) == wanted.digest:
        return []
    return [
        f"roundpipe: {wanted.name}: the data, or its tokens, are others than when the run began, so the model may "
        "have been trained on some of what is held out"
    ]


def _paths(names: Sequence[str]) -> tuple[Path, ...]:
    return tuple(Path(name) for name in names)


def _clock(run: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(run[CLOCK]) if run.get(CLOCK) else datetime.now()
