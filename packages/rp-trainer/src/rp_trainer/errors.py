"""The errors that end a fine-tuning in order. They import no torch; `roundpipe` prints each as one line."""

from __future__ import annotations


class Refused(Exception):
    """A setting, an argument or an input cannot be used; nothing was trained or overwritten."""


class Unwritable(Exception):
    """A result of the training cannot be written."""


class Diverged(Exception):
    """The loss or the gradients are not finite."""


class Lost(Exception):
    """Another process of the training is lost, or has failed."""


class ToldElsewhere(Exception):
    """All processes end with an error that the first one reports. `exit_code`: the status to exit with."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}; the first machine tells why")
        self.exit_code = exit_code
