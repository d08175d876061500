"""`PublishedCodes`: the codes of a block's weights on the host, made when the weights are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rp_optim import write_row_codes
from rp_transfer import Backend

from rp_state.codes.layout import DTYPE, CodedLayout


class PublishedCodes:
    """Codes of the weights that calls read, `memory`, and of those in the second block, `back`, if there is one.

    `stale`: the indices of weights that calls read which have changed since their codes were made. A step makes
    the codes of what it writes, and publication the others.
    """

    def __init__(self, backend: Backend, layout: CodedLayout) -> None:
        self.layout = layout
        self.memory = _allocated(backend, layout)
        self.back: torch.Tensor | None = None
        self.stale = set(layout.indices)
        self._weights = layout.weights(self.memory)
        # Without a second block results go where calls read.
        self._back_weights = self._weights
        # Those of results, where these go: the version of the master that each is of.
        self._made: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.memory.nbytes + (0 if self.back is None else self.back.nbytes)

    @property
    def target(self) -> torch.Tensor:
        """The memory of codes of results that calls do not read yet; without a second block they soon will."""
        return self.memory if self.back is None else self.back

    def make_back(self, backend: Backend) -> None:
        """Allocate codes of the second block."""
        self.back = _allocated(backend, self.layout)
        self._back_weights = self.layout.weights(self.back)

    def begin(self) -> None:
        """A step begins, or another one's results are given up."""
        self._made.clear()

    def make(self, index: int, weight: torch.Tensor, version: int) -> None:
        """Make the codes of a result, if the weight has some.

        `weight`: in the place where results go. `version`: its master's.
        """
        if index in self._weights:
            write_row_codes(weight, *self._back_weights[index])
            self._made[index] = version

    def is_made(self, index: int, version: int) -> bool:
        """Return whether the codes of a result are there, as its master was at this version."""
        return self._made.get(index) == version

    def publish(self, weights: Sequence[torch.Tensor]) -> None:
        """Have calls read the results' codes; make those that no step has made. `weights`: all results."""
        for index in self.layout.indices:
            if index not in self._made:
                write_row_codes(weights[index], *self._back_weights[index])
        if self.back is not None:
            self.memory, self.back = self.back, self.memory
            self._weights, self._back_weights = self._back_weights, self._weights
        self._made.clear()
        self.stale.clear()

    def note_changed(self, indices: Iterable[int]) -> None:
        """Weights that calls read have changed otherwise."""
        self.stale.update(index for index in indices if index in self._weights)

    def fits(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether a row of the first weight that calls read has the codes that are here, as a sample."""
        index = self.layout.indices[0]
        codes, scales = self._weights[index]
        row = slice(len(codes) // 2, len(codes) // 2 + 1)
        now = torch.empty_like(codes[row]), torch.empty_like(scales[row])
        write_row_codes(weights[index][row], *now)
        return torch.equal(now[0].view(DTYPE), codes[row].view(DTYPE)) and torch.equal(
            now[1].view(torch.int32), scales[row].view(torch.int32)
        )

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """Make the codes of weights that have changed otherwise, for calls to read. `weights`: that they read."""
        for index in sorted(self.stale):
            write_row_codes(weights[index], *self._weights[index])
        self.stale.clear()


def _allocated(backend: Backend, layout: CodedLayout) -> torch.Tensor:
    return backend.host_empty((layout.codes_nbytes,), DTYPE)
