"""Entry point of ``python -m roundpipe``: runs the command line."""

import sys

from roundpipe_command import main  # pyright: ignore[reportMissingTypeStubs]

sys.exit(main())
