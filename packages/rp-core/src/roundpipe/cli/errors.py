"""The errors that end the command with one line."""


class Refused(Exception):
    """What the user gave cannot be used; `main` prints the message as one line and ends with exit code 2."""


class Unwritable(Exception):
    """What training made cannot be written; `main` prints the message as one line and ends with exit code 1."""


class Diverged(Exception):
    """The loss is no finite number any more; `main` prints the message as one line and ends with exit code 1."""
