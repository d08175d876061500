"""``python -m roundpipe`` is the command line."""

from roundpipe.cli import main

main()
