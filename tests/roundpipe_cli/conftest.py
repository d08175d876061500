"""Guards that the tests of the command line share."""

from __future__ import annotations

from typing import NoReturn

import pytest
from roundpipe.cli import train


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as soon as a model would be made: whatever is refused must be refused before that."""

    def refuse(*_: object) -> NoReturn:
        pytest.fail("a model was about to be made")

    monkeypatch.setattr(train, "Job", refuse)
