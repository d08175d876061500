"""A checkpoint of several machines in one folder, each with the tensors that it owns; or of one machine alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rp_engine.connecting import Peers, Talk
from rp_engine.errors import MachineFailed

from rp_checkpoint.errors import CheckpointError


@dataclass(slots=True)
class SharedCheckpoint:
    """One checkpoint of the machines: what they tell each other, one thing after another, while it is written.

    Once a machine has told an error, or nothing is left to tell, the machines go their own ways. `lost`: what
    ended the machines' work meanwhile, if anything did: other errors of the checkpoint follow from it. `is_alone`:
    there is one machine, which has no others to tell.
    """

    rank: int
    talk: Talk
    path: Path
    is_over: bool = False
    lost: BaseException | None = None
    is_alone: bool = False

    @classmethod
    def of(cls, peers: Peers, path: Path) -> SharedCheckpoint:
        """A checkpoint that every machine begins now."""
        return cls(peers.rank, peers.new_talk(), path, is_alone=peers.is_alone)

    @property
    def is_first(self) -> bool:
        """Whether this machine makes the folder, and gives it its name when it is whole."""
        return self.rank == 0

    def say(self, what: str, value: Any = None) -> list[Any]:
        """See `Talk.say`."""
        return self._say(what, value)

    def _say(self, what: str, value: Any = None, error: BaseException | None = None) -> list[Any]:
        try:
            return self.talk.say(f"{what} of a checkpoint", value, error=error)
        except BaseException as failure:
            self.is_over = True
            self.lost = failure if self.talk.is_of_machines(failure) else self._lost_meanwhile(failure)
            raise

    def _lost_meanwhile(self, failure: BaseException) -> BaseException | None:
        """A machine that was given up misses what the others have removed: all speak again, so it learns that."""
        try:
            if isinstance(failure, MachineFailed):
                self.talk.say("the failure of a checkpoint")
        except Exception as lost:
            if self.talk.is_of_machines(lost):
                return lost
            raise
        return None

    def tell(self, what: str, error: BaseException) -> None:
        """Tell that this machine could not do it."""
        if not self.is_over:
            # Whoever is gone cannot be told.
            with suppress(Exception):
                self._say(what, error=error)

    def agree_on_folder(self, made: Path | None, path: Path) -> tuple[Path, Path]:
        """The folder that the first machine made, and its final name.

        Raises `CheckpointError` if this machine does not see the folder.
        """
        if made is not None and self.is_alone:
            return made, path
        own = None if made is None else [str(made), str(path)]
        shown, final = map(Path, self.say("the folder", own)[0])
        is_here = shown.is_dir()
        missing = [rank for rank, sees in enumerate(self.say("the place", is_here)) if not sees]
        if missing:
            # A machine that was given up meanwhile misses what the others have removed, and learns so here.
            self.say("who misses the folder")
            self.is_over = True
            raise CheckpointError(
                f"machines {', '.join(map(str, missing))} do not see {shown}, which machine 0 made; give a folder "
                "that all machines share"
            )
        return shown, final

    def agree_on_contents(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each machine writes: names and places of the tensors that it owns."""
        return self.say("the contents", dict(own))


def numbered(shards: Sequence[int], rank: int) -> tuple[int, int]:
    """How many shards the machines before this one have, and how many all have.

    >>> numbered([2, 3, 1], rank=1)
    (2, 6)
    """
    return sum(shards[:rank]), sum(shards)
