"""The command `roundpipe prepare`: tokenize data once, for any number of fine-tunings."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path

from rp_data.documents import Documents
from rp_data.gathered import InFile
from rp_data.images.pictures import Spool
from rp_data.prepared import IMAGES, TOKENS, is_prepared, prepared_in, write
from rp_data.reading import Eyes, Manner, check_some, read_all
from rp_trainer.errors import Refused
from rp_trainer.finetuning.files import finished_files, writing

from rp_cli.finetune.fetching import without_names
from rp_cli.finetune.inputs import check_not_for_images
from rp_cli.finetune.model import check_folders, config_file, loader_of, placeholders_in, sight_for
from rp_cli.finetune.options import FineTuning, Preparation
from rp_cli.finetune.places import check_places
from rp_cli.options.declared import GivenOptions, read


def prepare(given: Preparation) -> None:
    """Write the documents of the data, and what is known of them, to a folder.

    Raises `Refused` for data, a tokenizer or a folder that cannot be used.
    """
    tuning = _tuning(given)
    output = tuning.output
    assert output is not None
    check_places(tuning)
    _check_output(output, is_replaced=given.overwrite)
    options = without_names(tuning)
    check_folders(options)
    with writing(f"--output {output}"):
        output.mkdir(parents=True, exist_ok=True)
        with finished_files(output) as unfinished:
            documents = _prepared(options, unfinished)
        if not documents.images:
            # Of what it replaces.
            (output / IMAGES).unlink(missing_ok=True)
    _tell(given, output, documents)


def _tuning(given: Preparation) -> FineTuning:
    """Return the options of a fine-tuning for which the data is prepared."""
    names = GivenOptions(
        command="train",
        model=str(given.model),
        data=[str(path) for path in given.data or ()],
        output=str(given.output),
        sequence=str(given.sequence),
        completions_only=given.completions_only,
        skip_bad_rows=given.skip_bad_rows,
        overwrite=given.overwrite,
    )
    bound = () if given.image_cache is None else ("image_cache_gb",)
    for name in ("tokenizer", "min_pixels", "max_pixels", "image_cache", *bound):
        if getattr(given, name) is not None:
            setattr(names, name, str(getattr(given, name)))
    return read(FineTuning, names)


def _check_output(folder: Path, *, is_replaced: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise Refused(f"--output {folder} must be a folder, but is a file; name a new folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not is_prepared(folder):
        raise Refused(f"--output {folder} has other files in it; name a new or empty folder")
    if not is_replaced:
        raise Refused(f"--output {folder} has prepared data; replace it by --overwrite, or name another folder")


def _prepared(options: FineTuning, folder: Path) -> Documents:
    data = options.data or ()
    if (already := prepared_in("--data", data)) is not None:
        raise Refused(f"--data {already} is prepared already; give it to `roundpipe train`")
    seen = placeholders_in(config_file(options))
    manner = Manner(options.sequence, options.completions_only, options.skip_bad_rows, datetime.now(), seen)
    gather = partial(InFile, folder / TOKENS)
    eyes = Eyes(partial(sight_for, options), Spool(folder, IMAGES))
    _, known, (documents,) = read_all(loader_of(options), [("--data", data)], manner, gather, eyes)
    check_some(f"--data {', '.join(map(str, data))}", options.sequence, documents)
    if not documents.images:
        check_not_for_images(options)
    write(folder, documents, manner.made(known))
    return documents


def _tell(given: Preparation, folder: Path, documents: Documents) -> None:
    print(
        f"data: {documents.counts.samples:,} samples, {documents.tokens:,} tokens, {documents.labels:,} of which "
        "are learned"
    )
    if documents.images:
        print(f"{documents.shown}, which are in the folder, too")
    for line in (*documents.counts.lines(given.sequence), *documents.notes.lines("--data")):
        print(line)
    only = " --completions-only" if given.completions_only else ""
    print(
        f"prepared in {folder}: roundpipe train --data {folder} --sequence {given.sequence}{only}, with the "
        "tokenizer of the same model",
        flush=True,
    )
