"""Check that inputs and the output folder do not overlap: neither may be in a folder that the other uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rp_trainer.errors import Refused
from rp_trainer.finetuning.files import ALL_RESULTS

from rp_cli.finetune.options import FineTuning


def check_places(options: FineTuning) -> None:
    """Raise `Refused` if ``--overwrite`` would remove an input, or if a data folder contains the output.

    A run writes JSON lines and Markdown, which the next one would read as data.
    """
    if options.output is None:
        return
    output = _real(options.output)
    for flag, path in _inputs(options):
        place = _real(path)
        removed = place == output or any(place.is_relative_to(output / name) for name in ALL_RESULTS)
        if options.overwrite and removed:
            raise Refused(
                f"--overwrite would remove {flag} {path}, which belongs to the run in --output {options.output}; "
                "name another --output"
            )
        if flag.endswith("data") and output.is_relative_to(place):
            raise Refused(
                f"--output {options.output} is in {flag} {path}, all of whose files are read; name another folder"
            )


def _inputs(options: FineTuning) -> Iterator[tuple[str, Path]]:
    yield "--model", options.model
    if options.init_adapter is not None:
        yield "--init-adapter", options.init_adapter
    if options.tokenizer is not None:
        yield "--tokenizer", options.tokenizer
    for flag, paths in (("--data", options.data or ()), ("--eval-data", options.eval_data or ())):
        for path in paths:
            yield flag, path


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
