"""Build the sequences of each training step, as arguments of the model's forward."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import overload

import torch
from rp_trainer.errors import Refused
from rp_trainer.finetuning.batches import IGNORED
from torch import Tensor

from rp_data.batching.collating import Collator
from rp_data.batching.packing import packed
from rp_data.documents import Document, Documents

# Sequences that are not packed are padded to a multiple of this, so that few lengths occur.
_STEP = 8


class Sequences:
    """Documents as rows of a batch. `packing`: several in a row of `size` tokens, otherwise one in each row.

    Each epoch has every document once, in an order that depends only on the seed and the epoch. `weights`: how
    often an epoch has the documents of each source instead; with 1.5, each of them once, and half of them twice.
    `collator`: adds the images of documents, which are not packed then.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        size: int,
        packing: bool,
        seed: int,
        weights: Sequence[float] | None = None,
        collator: Collator | None = None,
    ) -> None:
        self._documents = documents.all
        self._collator = collator
        self._lengths = documents.lengths
        self._size, self._packing, self._seed = size, packing, seed
        sources = documents.sources or [len(documents.all)]
        self._sources = list(zip(sources, weights or [1.0] * len(sources), strict=True))
        self._row_cache = lru_cache(maxsize=2)(self._rows)
        self.in_epoch = len(self._row_cache(0))
        # The first row of each epoch. Of other documents, packing makes other rows.
        self._starts = [0, self.in_epoch]
        self._is_even = all(float(weight).is_integer() for _, weight in self._sources)

    @property
    def filled(self) -> float:
        """Which part of the first epoch's rows is documents."""
        lengths = (self._lengths[at] for row in self._row_cache(0) for at in row)
        return sum(lengths) / (self.in_epoch * self._size)

    def at(self, number: int) -> list[Document]:
        """Return the documents of row `number`, counted through all epochs."""
        while self._starts[-1] <= number:
            self._add_epoch()
        epoch = bisect_right(self._starts, number) - 1
        return [self._documents[at] for at in self._row_cache(epoch)[number - self._starts[epoch]]]

    def in_epochs(self, count: int) -> int:
        """Return the number of rows of the first `count` epochs."""
        while len(self._starts) <= count:
            self._add_epoch()
        return self._starts[count]

    def epochs(self, rows: int) -> float:
        """Return how many epochs the first so many rows are."""
        while self._starts[-1] < rows:
            self._add_epoch()
        whole = bisect_right(self._starts, rows) - 1
        if self._starts[whole] == rows:
            return float(whole)
        return whole + (rows - self._starts[whole]) / (self._starts[whole + 1] - self._starts[whole])

    def _add_epoch(self) -> None:
        rows = self.in_epoch if self._is_even else len(self._row_cache(len(self._starts) - 1))
        self._starts.append(self._starts[-1] + rows)

    def _in_epoch(self, epoch: int) -> list[int]:
        """Return the documents of an epoch, by number."""
        chosen: list[int] = []
        first = 0
        for number, (count, weight) in enumerate(self._sources):
            chosen += [*range(first, first + count)] * int(weight)
            if part := round(weight % 1 * count):
                some = random.Random(f"{self._seed} {epoch} {number}").sample(range(first, first + count), part)
                chosen += sorted(some)
            first += count
        return chosen

    def _rows(self, epoch: int) -> list[list[int]]:
        # A string seeds by its SHA-512, so neighbouring seeds and epochs give unrelated orders.
        numbers = random.Random(f"{self._seed} {epoch}")
        order = self._in_epoch(epoch)
        numbers.shuffle(order)
        if not self._packing:
            return [[document] for document in order]
        rows = [[order[at] for at in row] for row in packed([self._lengths[at] for at in order], self._size)]
        numbers.shuffle(rows)
        return rows

    def batch(self, first: int, count: int, pad: int) -> dict[str, Tensor]:
        """Return rows `first` to `first + count` as arguments of a model's forward, each (count, tokens) int64.

        Packed: ``input_ids``, ``labels``, and ``position_ids`` that restart with each document, by which models of
        transformers separate documents; the rest of a row is one more document, without labels. Otherwise
        ``input_ids``, ``labels`` and an ``attention_mask``, which is 0 for padding.
        """
        return self.of([self.at(number) for number in range(first, first + count)], pad)

    def batches(self, count: int, pad: int) -> Sequence[dict[str, Tensor]]:
        """Return all rows of the first epoch as batches of `count` rows; the last one may have fewer.

        With images, each batch is made when it is asked for.
        """
        rows = [self.at(number) for number in range(self.in_epoch)]
        groups = [rows[at : at + count] for at in range(0, len(rows), count)]
        made = LazyBatches(lambda at: self.of(groups[at], pad), len(groups))
        return made if self._collator else list(made)

    def of(self, rows: Sequence[Sequence[Document]], pad: int) -> dict[str, Tensor]:
        """Return the arguments, as `batch` does, for these rows."""
        if self._packing:
            return _packed_rows(rows, self._size, pad)
        longest = max(len(document) for row in rows for document in row)
        documents = [row[0] for row in rows]
        padded = _padded_rows(documents, min(-(-longest // _STEP) * _STEP, self._size), pad)
        return self._collator.with_images(documents, padded) if self._collator else padded


class LazyBatches(Sequence[dict[str, Tensor]]):
    """Batches that are made when they are asked for. `make`: makes the batch of a number below `count`."""

    def __init__(self, make: Callable[[int], dict[str, Tensor]], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._count

    @overload
    def __getitem__(self, at: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Tensor]]: ...
    def __getitem__(self, at: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Make a batch, or several."""
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(self._count))]
        if not 0 <= at < self._count:
            raise IndexError(at)
        return self._make(at)


def _packed_rows(rows: Sequence[Sequence[Document]], size: int, pad: int) -> dict[str, Tensor]:
    tokens = torch.full((len(rows), size), pad)
    labels, positions = torch.full_like(tokens, IGNORED), torch.empty_like(tokens)
    for row, documents in enumerate(rows):
        end = 0
        for document in documents:
            start, end = end, end + len(document)
            tokens[row, start:end], labels[row, start:end] = document.tensors()
            positions[row, start:end] = torch.arange(end - start)
        positions[row, end:] = torch.arange(size - end)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def _padded_rows(documents: Sequence[Document], size: int, pad: int) -> dict[str, Tensor]:
    tokens = torch.full((len(documents), size), pad)
    labels, mask = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    for row, document in enumerate(documents):
        end = len(document)
        tokens[row, :end], labels[row, :end] = document.tensors()
        mask[row, :end] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class StepBatches:
    """The batches of each step: `accumulation` calls with `batch` sequences each.

    Steps continue across epochs: one that an epoch does not fill is filled from the next. A step's sequences
    depend only on its number, so training can resume at any step.

    Raises `Refused` if there are fewer sequences than a step takes.
    """

    def __init__(self, sequences: Sequences, *, batch: int, accumulation: int, pad: int) -> None:
        self._sequences, self._batch, self._pad = sequences, batch, pad
        self.accumulation = accumulation
        self.rows = batch * accumulation
        if sequences.in_epoch < self.rows:
            raise Refused(
                f"a step takes {self.rows} sequences (--batch times --accumulation), but --data makes "
                f"{sequences.in_epoch}; lower these or --sequence, or provide more data"
            )

    def in_epochs(self, epochs: int) -> int:
        """Return the number of steps in `epochs` epochs."""
        return -(-self._sequences.in_epochs(epochs) // self.rows)

    def epoch(self, step: int) -> float:
        """Return how often the data was trained on by the end of step number `step`."""
        return self._sequences.epochs(step * self.rows)

    def calls(self, step: int) -> list[dict[str, Tensor]]:
        """Return the batches of step number `step`, counted from 1."""
        return [self.call(rows) for rows in self.documents(step)]

    def documents(self, step: int) -> list[list[list[Document]]]:
        """Return the documents of each row of each batch of a step."""
        first = (step - 1) * self.rows
        starts = range(first, first + self.rows, self._batch)
        return [[self._sequences.at(start + row) for row in range(self._batch)] for start in starts]

    def call(self, rows: Sequence[Sequence[Document]]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        return self._sequences.of(rows, self._pad)

    def tokens(self, step: int) -> int:
        """Return the number of tokens of a step, without padding."""
        first = (step - 1) * self.rows
        return sum(len(one) for number in range(first, first + self.rows) for one in self._sequences.at(number))
