"""The `roundpipe` command: fine-tunes, plans and tells about the machine, without a line of Python."""

__version__ = "0.1.0"
