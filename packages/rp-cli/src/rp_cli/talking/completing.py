"""The command `roundpipe generate`: complete the prompts of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from rp_data.images.videos import shown
from rp_data.notes import DataNotes
from rp_data.rows.prompts import Prompt, read_prompts
from rp_data.samples import Chat
from rp_strangers.refusing import refusing
from rp_trainer.errors import Refused
from tqdm import tqdm

from rp_cli.talking.options import GenerateOptions
from rp_cli.talking.speaker import Speaker, speaking
from rp_cli.talking.unfinished import Unfinished


def generate(options: GenerateOptions) -> None:
    """Write a line of JSON for each prompt, in order, as soon as its batch is complete.

    The file has its name once it has all of them. Raises `Refused` before anything is loaded for files that cannot
    be read or written.
    """
    prompts = read_prompts("--prompts", options.prompts, options.system)
    notes = DataNotes()
    _check_output(options)
    output = Unfinished(options.output, [prompt.row for prompt in prompts])
    if options.resume:
        output.resume()
    elif output.path.exists() and not options.overwrite:
        raise Refused(
            f"{output.path} has completions of a command that failed; go on with --resume, or --overwrite"
        )
    batches = list(_batches(prompts, options.batch))
    starts = [0, *accumulate(map(len, batches))]
    first = max(number for number, start in enumerate(starts) if start <= output.num_done)
    with (
        output.written(starts[first]),
        speaking(options, with_images=any(_kind(prompt)[1] for prompt in prompts), notes=notes) as speaker,
        tqdm(
            total=len(prompts), initial=starts[first], desc="generate", unit="prompt", disable=options.quiet
        ) as bar,
    ):
        for batch, start in zip(batches[first:], starts[first:], strict=False):
            # Whoever goes on later draws the same numbers.
            torch.manual_seed(options.seed + start)  # pyright: ignore[reportUnknownMemberType]
            output.add(_completed(speaker, batch))
            bar.update(len(batch))
    for line in notes.lines("--prompts"):
        print(f"roundpipe: {line}", file=sys.stderr, flush=True)
    if not options.quiet:
        print(f"{len(prompts)} completions are in {options.output}", flush=True)


def _check_output(options: GenerateOptions) -> None:
    output: Path = options.output
    if not output.absolute().parent.is_dir():
        raise Refused(f"--output {output} must be in a folder that is there, but {output.parent} is not")
    if output.exists() and not options.overwrite:
        raise Refused(f"--output {output} is there already; take another name, or --overwrite")
    if output.exists() and output.samefile(options.prompts):
        raise Refused("--output must be another file than --prompts")


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Prompts in their order, those that are completed together of one kind."""
    batch: list[Prompt] = []
    for prompt in prompts:
        if batch and (len(batch) == size or _kind(batch[0]) != _kind(prompt)):
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


def _kind(prompt: Prompt) -> tuple[bool, bool]:
    """What prompts that are completed together have in common: whether they are texts, and have images."""
    return isinstance(prompt.asked, str), isinstance(prompt.asked, Chat) and bool(prompt.asked.images)


def _completed(speaker: Speaker, batch: Sequence[Prompt]) -> list[str]:
    asked = [prompt.asked for prompt in batch]
    with refusing("--prompts ", (Refused,)):
        texts = [one if isinstance(one, str) else speaker.text_of(one) for one in asked]
    images = [
        shown((one, one.decoded()) for one in (() if isinstance(chat, str) else chat.images)) for chat in asked
    ]
    is_text, shows = _kind(batch[0])
    with refusing(f"{batch[0].place}: ", (Refused,)):
        try:
            return speaker.complete_seen(texts, images) if shows else speaker.complete(texts, is_form=not is_text)
        except torch.OutOfMemoryError as error:
            raise Refused(
                f"with the {len(batch) - 1} prompts after it, it takes more memory than the devices have; try a "
                "smaller --batch or --max-tokens, or more --microbatches, which read prompts one after another "
                f"({error})"
            ) from error
