"""The error of a command that cannot be carried out as given."""


class Refused(Exception):  # noqa: N818 - it says what happened, as the message does
    """What the user gave cannot be used; `main` prints the message as one line and ends with exit code 2."""
