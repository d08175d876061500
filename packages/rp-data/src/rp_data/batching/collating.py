"""Make the arguments of a call from documents of which some show images."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from rp_trainer.errors import Refused
from torch import Tensor
from torch.nn.functional import pad as padded

from rp_data.documents import Document, Documents
from rp_data.images.pictures import Picture, Spool
from rp_data.images.processor import Sight
from rp_data.images.videos import shown

_MOST_WORKERS = 8


class Collator:
    """Adds images to rows of tokens. `shaped`: what the processor has for each token, of texts, too.

    Threads decode; the processor, whose tokenizer has a state, works for one call at a time.
    """

    def __init__(self, sight: Sight, spool: Spool, shaped: Sequence[str]) -> None:
        self.sight, self._spool, self._shaped = sight, spool, shaped
        self._workers = ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1), "images")
        self._lock = Lock()

    def with_images(self, documents: Sequence[Document], rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of a call: `rows`, which are of these documents, with their images.

        Raises `Refused` for an image that has changed since the data was read.
        """
        ids = rows["input_ids"]
        plain = {name: torch.zeros_like(ids) for name in self._shaped}
        if not any(one.seen for one in documents):
            return {**rows, **plain}
        images = [
            [self._workers.submit(self._image, one) for one in _pictures(document)] for document in documents
        ]
        texts = ["" if one.seen is None else one.seen.text for one in documents]
        ready = [
            shown(zip(_pictures(document), [image.result() for image in some], strict=True))
            for document, some in zip(documents, images, strict=True)
        ]
        with self._lock:
            found = self.sight.processed(texts, ready)
        self._check(documents, found["input_ids"])
        whole = found["input_ids"].shape
        size = ids.shape[1]
        for name in self._shaped:
            if name in found and found[name].shape == whole:
                plain[name] = padded(found[name], (0, max(0, size - whole[1])))[:, :size]
        others = {name: one for name, one in found.items() if name not in self._shaped}
        return {**others, **rows, **plain}

    def _image(self, picture: Picture) -> Any:
        def decode() -> Any:
            return picture.decoded(self._spool.content(picture))

        return self.sight.image(picture.place, picture.digest, decode, is_video=picture.video >= 0)

    def _check(self, documents: Sequence[Document], ids: Tensor) -> None:
        """Refuse a processor that makes other tokens now: images would meet the placeholders of others."""
        for document, row in zip(documents, ids, strict=True):
            if document.seen is not None and not torch.equal(row[: len(document)], document.tensors()[0]):
                raise Refused(
                    f"{document.seen.pictures[0].place}: the processor makes other tokens of this row now than "
                    "when the data was read; begin a new run"
                )


def collator_of(read: Sequence[Documents], load: Callable[[], Sight | str], spool: Spool) -> Collator | None:
    """Return what adds images to the batches of these documents; None if they show none.

    `load`, `spool`: what has read them, see `rp_data.Eyes`.
    """
    if not any(documents.images for documents in read):
        return None
    sight = load()
    if isinstance(sight, str):
        # Data that was prepared for another model.
        raise Refused(f"the data has images, but {sight}")
    return Collator(sight, spool, sorted({name for documents in read for name in documents.shaped}))


def _pictures(document: Document) -> Sequence[Picture]:
    return () if document.seen is None else document.seen.pictures
