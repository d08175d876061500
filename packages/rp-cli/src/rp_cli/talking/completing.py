"""The command `roundpipe generate`: complete the prompts of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rp_trainer.errors import Refused
from tqdm import tqdm

from rp_cli.strangers.refusing import refusing
from rp_cli.talking.options import GenerateOptions
from rp_cli.talking.prompts import Prompt, prompts_in
from rp_cli.talking.speaker import Speaker, speaking


def generate(options: GenerateOptions) -> None:
    """Write a line of JSON for each prompt, in order, as soon as its batch is complete.

    Raises `Refused` before anything is loaded for files that cannot be read or written.
    """
    prompts = prompts_in(options.prompts, options.system)
    _check_output(options)
    with (
        speaking(options) as speaker,
        _opened(options.output) as file,
        tqdm(total=len(prompts), desc="generate", unit="prompt", disable=options.quiet) as bar,
    ):
        for batch in _batches(prompts, options.batch):
            for prompt, said in zip(batch, _completed(speaker, batch), strict=True):
                file.write(json.dumps({**prompt.row, "completion": said}, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(batch))
    if not options.quiet:
        print(f"{len(prompts)} completions are in {options.output}", flush=True)


def _opened(path: Path) -> TextIO:
    with refusing(f"--output {path} cannot be written: ", (OSError,)):
        return path.open("w", encoding="utf-8")


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
        if batch and (len(batch) == size or (batch[0].text is None) != (prompt.text is None)):
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


def _completed(speaker: Speaker, batch: Sequence[Prompt]) -> list[str]:
    with refusing(f"{batch[0].place}: ", (Refused,)):
        is_form = batch[0].text is None
        texts = [prompt.text or speaker.text_of(prompt.row["messages"]) for prompt in batch]
        return speaker.complete(texts, is_form=is_form)
