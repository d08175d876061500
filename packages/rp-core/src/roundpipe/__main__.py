"""Entry point of ``python -m roundpipe``: runs the command line."""

import sys

from roundpipe.cli import main

sys.exit(main())
