"""What machines tell each other of a checkpoint, where one of them is given up in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from roundpipe import CheckpointError, MachineFailed
from rp_checkpoint.saving.shared import SharedCheckpoint
from rp_dist import DistError, MachineLost


class Answers:
    """A stand-in for `Talk`: what all machines say, one thing after another."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def say(self, kind: str, value: Any = None, *, error: BaseException | None = None) -> list[Any]:
        """The next answer."""
        del kind, value, error
        found: list[Any] | BaseException = next(self._answers)
        if isinstance(found, BaseException):
            raise found
        return found

    def is_of_machines(self, error: BaseException) -> bool:
        """See `Talk.is_of_machines`."""
        return isinstance(error, DistError)


def meets(path: Path, *answers: Any) -> SharedCheckpoint:
    """The checkpoint of a machine that does not see the folder."""
    talk: Any = Answers([[str(path / "gone"), str(path)], None], [True, False], *answers)
    return SharedCheckpoint(1, talk, path)


def test_a_machine_that_misses_the_folder_because_it_was_given_up_learns_that(tmp_path: Path) -> None:
    shared = meets(tmp_path, MachineLost(0, "rank 0 gave this machine up"))
    with pytest.raises(MachineLost, match="gave this machine up"):
        shared.agree_on_folder(None, tmp_path)
    assert isinstance(shared.lost, MachineLost)


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"machines 1 do not see .*gone"):
        meets(tmp_path, [None, None]).agree_on_folder(None, tmp_path)


def test_a_machine_that_fails_because_it_was_given_up_learns_that(tmp_path: Path) -> None:
    lost = MachineLost(0, "rank 0 gave this machine up")
    failed = MachineFailed(1, "machine 1 failed: FileNotFoundError")
    for last, learnt in ((lost, lost), ([None, None], None)):
        talk: Any = Answers(failed, last)
        shared = SharedCheckpoint(1, talk, tmp_path)
        shared.tell("the contents", FileNotFoundError("gone"))
        assert shared.lost is learnt
        assert shared.is_over
