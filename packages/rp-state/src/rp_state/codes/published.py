"""The codes of a block's weights on the host, made when the weights are written: `PublishedCodes`, or none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from rp_optim import write_row_codes
from rp_transfer import Backend

from rp_state.codes.layout import DTYPE, CodedLayout


class Codes(Protocol):
    """The codes of a block's weights, or none: see `PublishedCodes`.

    `are_there`: whether some weights have codes. `memories`: what calls read. `targets`: where results' go.
    """

    @property
    def are_there(self) -> bool: ...
    @property
    def stale(self) -> Collection[int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memories(self) -> Sequence[torch.Tensor]: ...
    @property
    def targets(self) -> Sequence[torch.Tensor]: ...

    def make_back(self, backend: Backend) -> None: ...
    def begin(self) -> None: ...
    def make(self, index: int, weight: torch.Tensor, version: int) -> None: ...
    def is_made(self, index: int, version: int) -> bool: ...
    def publish(self, weights: Sequence[torch.Tensor]) -> None: ...
    def note_changed(self, indices: Iterable[int]) -> None: ...
    def fits(self, weights: Sequence[torch.Tensor]) -> bool: ...
    def renew(self, weights: Sequence[torch.Tensor]) -> None: ...


class NoCodes:
    """Of a block whose weights have no codes: nothing to make, to publish or to copy."""

    are_there: bool = False
    nbytes: int = 0
    stale: Collection[int] = ()
    memories: Sequence[torch.Tensor] = ()
    targets: Sequence[torch.Tensor] = ()

    def make_back(self, backend: Backend) -> None:
        """Nothing."""

    def begin(self) -> None:
        """Nothing."""

    def make(self, index: int, weight: torch.Tensor, version: int) -> None:
        """Nothing."""

    def is_made(self, index: int, version: int) -> bool:
        """It is not."""
        return False

    def publish(self, weights: Sequence[torch.Tensor]) -> None:
        """Nothing."""

    def note_changed(self, indices: Iterable[int]) -> None:
        """Nothing."""

    def fits(self, weights: Sequence[torch.Tensor]) -> bool:
        """Nothing contradicts."""
        return True

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """Nothing."""


class PublishedCodes:
    """Codes of the weights that calls read, `memory`, and of results, `target`: other memory with a second block.

    `stale`: the indices of weights that calls read which have changed since their codes were made. A step makes
    the codes of what it writes, and publication the others.
    """

    are_there: bool = True

    def __init__(self, backend: Backend, layout: CodedLayout) -> None:
        self.layout = layout
        self.memory = _allocated(backend, layout)
        # Without a second block results go where calls read.
        self.target = self.memory
        self.stale = set(layout.indices)
        self._weights = layout.weights(self.memory)
        self._target_weights = self._weights
        # Those of results, where these go: the version of the master that each is of.
        self._made: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.memory.nbytes if self.target is self.memory else self.memory.nbytes + self.target.nbytes

    @property
    def memories(self) -> Sequence[torch.Tensor]:
        """The memory that calls read."""
        return (self.memory,)

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """The memory of codes of results that calls do not read yet; without a second block they soon will."""
        return (self.target,)

    def make_back(self, backend: Backend) -> None:
        """Allocate codes of the second block."""
        self.target = _allocated(backend, self.layout)
        self._target_weights = self.layout.weights(self.target)

    def begin(self) -> None:
        """A step begins, or another one's results are given up."""
        self._made.clear()

    def make(self, index: int, weight: torch.Tensor, version: int) -> None:
        """Make the codes of a result, if the weight has some.

        `weight`: in the place where results go. `version`: its master's.
        """
        if index in self._weights:
            write_row_codes(weight, *self._target_weights[index])
            self._made[index] = version

    def is_made(self, index: int, version: int) -> bool:
        """Return whether the codes of a result are there, as its master was at this version."""
        return self._made.get(index) == version

    def publish(self, weights: Sequence[torch.Tensor]) -> None:
        """Have calls read the results' codes; make those that no step has made. `weights`: all results."""
        for index in self.layout.indices:
            if index not in self._made:
                write_row_codes(weights[index], *self._target_weights[index])
        self.memory, self.target = self.target, self.memory
        self._weights, self._target_weights = self._target_weights, self._weights
        self._made.clear()
        self.stale.clear()

    def note_changed(self, indices: Iterable[int]) -> None:
        """Weights that calls read have changed otherwise."""
        self.stale.update(index for index in indices if index in self._weights)

    def fits(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether a row of the first weight that calls read has the codes that are here, as a sample.

        True also while some are stale.
        """
        if self.stale:
            return True
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
