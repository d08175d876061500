"""The errors that end the command with one line."""


class Refused(Exception):
    """An argument or an input file cannot be used; `main` prints the message as one line and returns 2."""


class Unwritable(Exception):
    """A result of the training cannot be written; `main` prints the message as one line and returns 1."""


class Diverged(Exception):
    """The loss or the gradients are not finite; `main` prints the message as one line and returns 1."""


class Lost(Exception):
    """Another machine is lost, or has failed; `main` prints the message as one line and returns 1."""


class ToldElsewhere(Exception):
    """All machines end with an error that the first one prints; `main` prints nothing and returns `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}; the first machine tells why")
        self.exit_code = exit_code
