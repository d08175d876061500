"""The errors that end the command with one line."""


class Refused(Exception):
    """An argument or an input file cannot be used; `main` prints the message as one line and returns 2."""


class Unwritable(Exception):
    """A result of the training cannot be written; `main` prints the message as one line and returns 1."""


class Diverged(Exception):
    """The loss or the gradients are not finite; `main` prints the message as one line and returns 1."""
