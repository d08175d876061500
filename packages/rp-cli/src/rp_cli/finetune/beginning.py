"""What is said of the weights that a fine-tuning begins with, and of what is not taken from where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rp_sources.sources import note_of
from rp_sources.trained_on import is_other

from rp_cli.finetune.model import has_weights
from rp_cli.finetune.options import FineTuning

# Of transformers' Trainer: its steps, beside the weights of a checkpoint.
_OF_TRAINER = "trainer_state.json"
_OF_CHECKPOINT = "roundpipe/complete"
_NOT_TAKEN = "its optimizer's state, schedule, random numbers and place in the data are not: all begin anew"


def begun_from(options: FineTuning) -> str:
    """Return lines on the weights, with their ends; none if they are simply those in the folder."""
    return "".join(f"{line}\n" for line in _lines(options))


def _lines(options: FineTuning) -> Iterator[str]:
    if not has_weights(options):
        yield f"random weights: {options.model} has none"
    yield from _of("--model", options.model, "the weights")
    if options.init_adapter is not None:
        yield f"the adapter in {options.init_adapter} is where training begins"
        yield from _of("--init-adapter", options.init_adapter, "the adapter")
        if has_weights(options) and is_other(options.model, note_of(options.init_adapter)):
            yield f"the adapter was trained with another model: the weights in {options.model} are others"


def _of(option: str, folder: Path, what: str) -> Iterator[str]:
    if (folder / _OF_TRAINER).is_file():
        yield f"{option}: {what} of a checkpoint of transformers' Trainer; {_NOT_TAKEN}"
    elif (folder / _OF_CHECKPOINT).is_file():
        yield f"{option}: {what} of a checkpoint of RoundPipe; {_NOT_TAKEN}, unless --resume goes on with its run"
