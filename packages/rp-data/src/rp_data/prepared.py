"""Data that is tokenized already, in a folder: `roundpipe prepare` writes it, and `--data` takes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rp_strangers.files import bounded_bytes
from rp_trainer.errors import Refused

from rp_data.documents import Counts, Documents
from rp_data.mapped import Mapped
from rp_data.notes import DataNotes

FACTS, TOKENS, IMAGES = "prepared.json", "documents.arrow", "images.bin"
# Far more than the facts take.
_MOST_BYTES = 2**20
_FORMAT = 3
_PROBE = "One two,\n\t three  4567 \u00e9\u4e16\U0001f600 don't <|im_end|></s>"


@dataclass(frozen=True, slots=True)
class PreparedFrom:
    """How prepared data was made. `tokenizer`: its fingerprint. `clock`: the time that chat templates saw."""

    sequence: int
    completions_only: bool
    tokenizer: str
    clock: str


def fingerprint(tokenizer: Any) -> str:
    """Return what tells tokenizers apart: a digest of all tokens, of the chat template, and of an example."""
    facts = [
        sorted(tokenizer.get_vocab().items()),
        getattr(tokenizer, "chat_template", None),
        [tokenizer.bos_token_id, tokenizer.eos_token_id],
        list(tokenizer(_PROBE)["input_ids"]),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def is_prepared(path: Path) -> bool:
    """Return whether a path is a folder with prepared data."""
    return (path / FACTS).is_file()


def prepared_in(option: str, paths: Sequence[Path]) -> Path | None:
    """Return the folder with prepared data among an option's paths. Raises `Refused` if there is more."""
    chosen = [path for path in paths if is_prepared(path)]
    if chosen and len(paths) > 1:
        raise Refused(f"{option} {chosen[0]} is prepared data, which is named alone; prepare all of it together")
    return chosen[0] if chosen else None


def write(folder: Path, documents: Documents, made: PreparedFrom) -> None:
    """Describe the documents that `Writer` has written to a folder."""
    facts = {
        "format": _FORMAT,
        **asdict(made),
        "counts": asdict(documents.counts),
        "notes": asdict(documents.notes),
        "has_end": documents.has_end,
        "sources": list(documents.sources),
        "images": documents.images,
        "shaped": list(documents.shaped),
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_prepared(option: str, folder: Path, made: PreparedFrom) -> Documents:
    """Return the documents in a folder, as they are on the disk.

    Raises `Refused` if they were made in another manner than `made` says, apart from the clock, or are damaged.
    """
    what = f"{option} {folder}"
    facts = _facts(what, folder)
    was = {name: facts.get(name) for name in asdict(made)}
    for name, words in (("sequence", "--sequence {}"), ("completions_only", "--completions-only {}")):
        if was[name] != getattr(made, name):
            raise Refused(
                f"{what} was prepared with {words.format(was[name])}, but this is "
                f"{words.format(getattr(made, name))}; set it so, or prepare the data again"
            )
    if was["tokenizer"] != made.tokenizer:
        raise Refused(f"{what} was prepared with another tokenizer; name that, or prepare the data again")
    table = Mapped(folder / TOKENS, folder / IMAGES)
    try:
        counts, notes = Counts(**facts["counts"]), DataNotes(**facts["notes"])
        sources, has_end = list(facts["sources"]), bool(facts["has_end"])
        images, shaped = int(facts["images"]), [str(name) for name in facts["shaped"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{what} has no facts that can be used ({error}); prepare the data again") from None
    return Documents(table, counts, has_end, table.check(), notes, sources, images, shaped)


def _facts(what: str, folder: Path) -> Mapping[str, Any]:
    content = bounded_bytes(f"{what}: {FACTS}", folder / FACTS, _MOST_BYTES)
    try:
        facts: Any = json.loads(content)
    except (ValueError, RecursionError):
        facts = None
    named = cast("Mapping[str, Any]", facts if isinstance(facts, dict) else {})
    if named.get("format") != _FORMAT:
        raise Refused(f"{what} was prepared by another version; prepare the data again")
    return named
