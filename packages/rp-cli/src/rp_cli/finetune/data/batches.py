"""Build the sequences of each training step, as arguments of the model's forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from rp_trainer.errors import Refused
from rp_trainer.finetuning.batches import IGNORED
from torch import Tensor

from rp_cli.finetune.data.packing import packed
from rp_cli.finetune.data.tokens import Document, Documents

# Sequences that are not packed are padded to a multiple of this, so that few lengths occur.
_STEP = 8


class Sequences:
    """Documents as rows of a batch. `packing`: several in a row of `size` tokens, otherwise one in each row.

    Each epoch has every document once, in an order that depends only on the seed and the epoch.
    """

    def __init__(self, documents: Documents, *, size: int, packing: bool, seed: int) -> None:
        self._documents = documents.all
        self._lengths = documents.lengths
        self._size, self._packing, self._seed = size, packing, seed
        self._row_cache = lru_cache(maxsize=2)(self._rows)
        self.in_epoch = len(self._row_cache(0))

    def at(self, number: int) -> list[Document]:
        """Return the documents of row `number`, counted through all epochs."""
        epoch, row = divmod(number, self.in_epoch)
        return [self._documents[at] for at in self._row_cache(epoch)[row]]

    def _rows(self, epoch: int) -> list[list[int]]:
        # A string seeds by its SHA-512, so neighbouring seeds and epochs give unrelated orders.
        numbers = random.Random(f"{self._seed} {epoch}")
        order = list(range(len(self._documents)))
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

    def batches(self, count: int, pad: int) -> list[dict[str, Tensor]]:
        """Return all rows of the first epoch as batches of `count` rows; the last one may have fewer."""
        rows = [self.at(number) for number in range(self.in_epoch)]
        return [self.of(rows[at : at + count], pad) for at in range(0, len(rows), count)]

    def of(self, rows: Sequence[Sequence[Document]], pad: int) -> dict[str, Tensor]:
        """Return the arguments, as `batch` does, for these rows."""
        if self._packing:
            return _packed_rows(rows, self._size, pad)
        longest = max(len(document) for row in rows for document in row)
        return _padded_rows([row[0] for row in rows], min(-(-longest // _STEP) * _STEP, self._size), pad)


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


class Steps:
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
        return -(-epochs * self._sequences.in_epoch // self.rows)

    def calls(self, step: int) -> list[dict[str, Tensor]]:
        """Return the batches of step number `step`, counted from 1."""
        first = (step - 1) * self.rows
        starts = range(first, first + self.rows, self._batch)
        return [self._sequences.batch(start, self._batch, self._pad) for start in starts]

    def tokens(self, step: int) -> int:
        """Return the number of tokens of a step, without padding."""
        first = (step - 1) * self.rows
        return sum(len(one) for number in range(first, first + self.rows) for one in self._sequences.at(number))
